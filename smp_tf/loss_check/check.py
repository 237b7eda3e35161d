"""Compares the losses and logs of a training with those of the whole batch, once for each structure of a batch.

A pipeline computes losses and metrics for microbatches and averages them. Where they are averages over samples, this is
the training of one process. Where they are not (sums, masked averages, losses that compare samples), it is another
training.

    before the first batch    the step is traced a second time, for all samples and without backward; where both traces
                              agree, tensors are chosen that hold samples (partition/samples/batch_tail.py), and the
                              step hands them out
    in the first batch        every rank keeps those that it makes
    after it                  one rank joins them, computes losses and logs once, and compares; all ranks are told

For the first batch of a training, the samples are those of all replicas. Later they are those of this replica, since
replicas come to another structure one by one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from smp_tf.announce import announce
from smp_tf.batch.microbatches import sizes_of
from smp_tf.gradients.other_training import report
from smp_tf.job import exchange, runtime
from smp_tf.loss_check.batch_tail_values import BatchValues, TailValues
from smp_tf.loss_check.differences import Parts, cause_of, is_equal
from smp_tf.loss_check.kept_values import ReplicaValues, bring_together
from smp_tf.ops import keep as kept_ops
from smp_tf.partition.graph.op_graph import ARGUMENT, UNSENDABLE_DTYPES, OpGraph, Tensor
from smp_tf.partition.mesh import CommGroup
from smp_tf.partition.samples.batch_tail import DEPENDS_ON_GRADIENTS, find_tail
from smp_tf.partition.samples.gradient_uses import nonlinear_uses
from smp_tf.partition.samples.once_per_batch import STATE, state_name, writers_of_states
from smp_tf.partition.trace.lower import OutputSlot
from smp_tf.steps.program import SplitProgram
from smp_tf.whole_batch.noted_trace import BatchTraces, NotedTrace
from smp_tf.whole_batch.tail_graph import joined_cut
from smp_tf.whole_batch.traced_results import follows_state, named_leaves

_WAY_OUT = "train with microbatches=1 on one replica"


class LossCheck:
    """The check of one program of a step.

    Args:
        traces: the traces of the step. It returns a dictionary with the logs under "results".
        samples: the samples of every replica that the whole batch is made of, in the replicas' order.
        joins_replicas: whether these are the samples of all replicas.
        with_states: whether the states of metrics are compared, too.
        key: the key by which tensors are kept, one for each program of the process.
        metric_of: the metric that holds a variable, by the variable's identity.
    """

    def __init__(
        self,
        traces: BatchTraces,
        samples: Sequence[int],
        *,
        joins_replicas: bool,
        with_states: bool,
        key: str,
        metric_of: Mapping[int, str],
    ) -> None:
        part, whole = traces.part, traces.whole
        self._metric_of = metric_of
        self._step = traces.step
        self._whole = whole.trace
        self._samples = list(samples)
        self._joins_replicas = joins_replicas
        self._key = key
        self._graph, self._part_graph = whole.trace.lowered.graph, part.trace.lowered.graph
        self._rows = traces.rows
        numbers, of_whole = _numbers_in(part), _numbers_in(whole)
        wanted: dict[str, Sequence[Tensor | int]] = {name: of_whole[name] for name in numbers if name in of_whole}
        if with_states:
            # Others are written once per batch.
            ours, variables = part.trace.lowered.variables, whole.trace.lowered.variables
            written = {id(ours[index]) for node in self._part_graph.nodes for index in node.writes}
            writers = writers_of_states(self._graph).items()
            wanted.update({state_name(i): numbers for i, numbers in writers if id(variables[i]) in written})
        self._tail = find_tail(self._graph, self._rows, wanted, runs_layers=True)
        self._numbers = {name: tensors for name, tensors in numbers.items() if name in self._tail.results}
        kept = [cut.part for cut in self._tail.cuts]
        kept += [tensor for tensors in self._numbers.values() for tensor in tensors]
        #: Tensors of the microbatch's graph that the step hands out.
        self.kept: tuple[Tensor, ...] = tuple(dict.fromkeys(kept))
        self._kept_here: list[int] = []

    def can_be_joined(self, has_composites: bool) -> bool:
        """Returns whether the arguments that the whole batch is computed from can be joined over several replicas.

        Args:
            has_composites: whether ragged or sparse tensors are among the step's arguments.
        """
        nodes = (self._graph.nodes[number] for number in self._tail.nodes)
        is_text = any(node.op == ARGUMENT and node.outputs[0].dtype in UNSENDABLE_DTYPES for node in nodes)
        return not self._tail.arguments or not (has_composites or is_text)

    @property
    def nbytes(self) -> int:
        """Returns the bytes that are kept of the whole batch."""
        return sum(self._graph.type_of(cut.whole).nbytes() for cut in self._tail.cuts)

    @property
    def left_out(self) -> dict[str, str]:
        """Returns losses and logs that are not compared, and why. What is made from gradients is checked apart."""
        return {
            name: why
            for name, why in self._tail.left_out.items()
            if (why != DEPENDS_ON_GRADIENTS or name.startswith("loss")) and not name.startswith(STATE)
        }

    def hand_out(self, outputs: Sequence[Any]) -> None:
        """Adds ops to the step's graph that keep tensors when they are asked for.

        Args:
            outputs: a `StepOutput` for each tensor of `kept`.
        """
        self._kept_here = [number for number, output in enumerate(outputs) if output.is_local]
        here = [outputs[number].outputs for number in self._kept_here]
        for microbatch, values in enumerate(zip(*here, strict=True)):
            kept_ops.keep(values, self._key, microbatch=microbatch)

    @contextlib.contextmanager
    def watching(self, program: SplitProgram, tensors: Sequence[Any], kept: Sequence[OutputSlot]) -> Iterator[None]:
        """Keeps tensors of the step, which runs once within its context, and then compares losses and logs.

        Args:
            program: the step's program.
            tensors: arguments of the program.
            kept: the positions of the tensors of `kept` among its outputs.

        Raises:
            StepError: a loss, or a log, is not that of the whole batch.
        """
        values = TailValues(self._whole, self._tail)
        kept_ops.want(self._key, True)
        try:
            yield
            brought = self._bring_together(values, program, tensors, kept)
        finally:
            kept_ops.want(self._key, False)
        found: list[str] = []
        failure = None
        if brought is not None:
            try:
                found = self._differences(values, program, brought)
            except Exception as error:
                # It is an error of the check and not of the training. All ranks are told, and rank 0 prints it.
                failure = f"the whole batch cannot be computed of its microbatches: {type(error).__name__}: {error}"
        group = CommGroup.WORLD if self._joins_replicas else CommGroup.PP_GROUP
        said: list[Any] = [[found, failure]]
        if len(exchange.members_of(group)) > 1:
            said = exchange.allgather_json(said[0], group, name=f"the check of the losses of {self._step}")
        for _, why in said:
            if why is not None:
                tell_unchecked(self._step, why)
        _report(self._step, [text for texts, _ in said for text in texts])

    def _bring_together(
        self, values: TailValues, program: SplitProgram, tensors: Sequence[Any], slots: Sequence[OutputSlot]
    ) -> list[ReplicaValues] | None:
        """Returns what the ranks have kept, on the rank that compares; None on others."""
        split, graph = program.stage_program.split, self._part_graph
        stages = [split.stage_of(split.outputs[slot.outputs[0]]) for slot in slots]
        sizes = dict.fromkeys(range(len(exchange.members_of(CommGroup.PP_GROUP))), 0)
        for stage, tensor in zip(stages, self.kept, strict=True):
            if stage is not None:
                sizes[stage] += 1 + graph.type_of(tensor).nbytes()
        # The last of those that have most. It also has what every stage makes.
        collector = max(sizes, key=lambda stage: (sizes[stage], stage))
        own: dict[int, list[np.ndarray]] = {number: [] for number in self._kept_here}
        dtypes = [tf.as_dtype(graph.type_of(self.kept[number]).dtype) for number in own]
        for microbatch in range(program.microbatches if own else 0):
            for number, value in zip(own, kept_ops.take(self._key, microbatch, dtypes), strict=True):
                own[number].append(value.numpy())
        if not self._is_alike_on_all(collector, stages):
            return None
        flat = tf.nest.flatten(list(tensors), expand_composites=True)
        return bring_together(
            own,
            [self._whole.lowered.variables[index].numpy() - before for index, before in values.before.items()],
            {number: np.asarray(flat[number]) for number in self._tail.arguments},
            stages=[collector if stage is None else stage for stage in stages],
            collector=collector,
            microbatches=program.microbatches,
            of_all_replicas=self._joins_replicas,
        )

    def _is_alike_on_all(self, collector: int, stages: Sequence[int | None]) -> bool:
        """Returns whether all replicas keep the same tensors. Replicas whose batches differ in size may not."""
        if not self._joins_replicas:
            return True
        names = [f"{self._part_graph.nodes[tensor.node].name}:{tensor.index}" for tensor in self.kept]
        mine = [collector, list(stages), names, list(self._tail.arguments), sorted(self._tail.results)]
        said = exchange.allgather_json(mine, name=f"what the check of the losses of {self._step} goes by")
        if all(other == said[0] for other in said):
            return True
        tell_unchecked(self._step, "the first batches of the replicas differ in size, and their graphs with them")
        return False

    def _differences(self, values: TailValues, program: SplitProgram, by_replica: Sequence[ReplicaValues]) -> list[str]:
        place = {tensor: number for number, tensor in enumerate(self.kept)}
        cuts = []
        for cut in self._tail.cuts:
            parts = [value for replica in by_replica for value in replica.kept[place[cut.part]]]
            cuts.append(parts[0] if cut.axis is None else np.asarray(joined_cut(cut, parts)))
        whole = values.compute(cuts, self._joined_arguments(program, by_replica))
        sizes = [n for samples in self._samples for n in sizes_of(samples, program.microbatches)]
        scale, itemsize = _size_of(cuts), self._itemsize
        found = []
        for name, tensors in self._numbers.items():
            parts_of = [
                sum(float(replica.kept[place[tensor]][microbatch].sum()) for tensor in tensors)
                for replica in by_replica
                for microbatch in range(program.microbatches)
            ]
            once = np.asarray(sum(value.sum() for value in whole.results[name]), whole.results[name][0].dtype)
            found.append(self._difference(name, once, Parts(parts_of, sizes), scale, itemsize))
        found = [text for text in found if text]
        # A metric of a loss that differs says nothing new.
        return found or self._different_states(whole, values.before, by_replica, program.microbatches, scale, itemsize)

    def _joined_arguments(self, program: SplitProgram, by_replica: Sequence[ReplicaValues]) -> dict[int, np.ndarray]:
        found = {}
        for number in self._tail.arguments:
            parts = [replica.arguments[number] for replica in by_replica]
            axis = program.arguments[number].axis if len(parts) > 1 else None
            found[number] = parts[0] if axis is None else np.concatenate(parts, axis)
        return found

    def _difference(self, name: str, once: np.ndarray, parts: Parts, scale: float, itemsize: int) -> str:
        """Returns a sentence about a number that is not that of the whole batch; nothing for one that is."""
        if is_equal(once, np.asarray(parts.average), scale, itemsize=itemsize):
            return ""
        what = f"The {name} that gradients are taken of" if name.startswith("loss") else f"The {name}"
        return (
            f"{what} is {float(once):.6g} for the whole batch of {sum(parts.samples)} samples, and "
            f"{parts.average:.6g} as the average over its {len(parts.values)} microbatches. "
            f"{cause_of(float(once), parts, divides=self._divides(name), itemsize=once.dtype.itemsize)}."
        )

    def _different_states(
        self,
        whole: BatchValues,
        before: Mapping[int, np.ndarray],
        by_replica: Sequence[ReplicaValues],
        microbatches: int,
        scale: float,
        itemsize: int,
    ) -> list[str]:
        """Returns sentences about metrics whose states after the batch differ from those of the whole batch."""
        found: dict[str, str] = {}
        for number, (index, held) in enumerate(before.items()):
            variable = self._whole.lowered.variables[index]
            adds_up = len(by_replica) == 1 or variable.aggregation is tf.VariableAggregation.SUM
            if held.dtype.kind not in "fiu" or not adds_up:
                continue
            once = np.asarray(whole.states[index] - held)
            parts = np.asarray(sum(replica.changes[number] for replica in by_replica))
            # The value of a state is rounded as often as something was added to it.
            rounded = 0.0
            if held.dtype.kind == "f":
                largest = max(float(np.abs(value).max(initial=0.0)) for value in (held, whole.states[index]))
                rounded = 4.0 * len(self._samples) * microbatches * float(np.finfo(held.dtype).eps) * largest
            if is_equal(once, parts, scale, itemsize=itemsize, rounded=rounded):
                continue
            name = self._graph.variables[index].name
            metric = self._metric_of.get(id(variable))
            what = f"Its variable {name!r}" if metric is None else f"Its metric {metric!r} (variable {name!r})"
            found.setdefault(
                metric or name,
                f"{what} grows by {_short(once)} with the whole batch, and by {_short(parts)} with its microbatches, "
                f"for each of which it is updated. Give a metric values of samples in place of a number for the batch, "
                f"or make it one whose state adds up over parts of a batch.",
            )
        return list(found.values())

    @property
    def _itemsize(self) -> int:
        """Returns the bytes of an element of the narrowest floats that losses are computed from."""
        kinds = [tf.as_dtype(self._part_graph.type_of(tensor).dtype) for tensor in self.kept]
        return min((kind.size for kind in kinds if kind.is_floating), default=8)

    def _divides(self, name: str) -> bool:
        """Returns whether a number is a quotient whose divisor depends on samples."""
        behind = self._graph.ancestors(t.node for t in self._tail.results[name] if isinstance(t, Tensor))
        quotients = (self._graph.nodes[n] for n in behind.intersection(self._tail.nodes))
        divisors = [node.inputs[1] for node in quotients if node.op in ("RealDiv", "DivNoNan")]
        contents = [self._rows.of(tensor) for tensor in divisors if not self._rows.is_constant(tensor)]
        return any(divisor.samples and divisor.rows is None for divisor in contents)


def tell_unchecked(step: str, why: str) -> None:
    """Says, once and on rank 0, what is not compared with the whole batch.

    Args:
        step: words for the step.
        why: the reason, without a full stop.
    """
    rank = runtime.current().topology.rank
    announce(f"{step}: check_losses does not hold this against the whole batch: {why}.", rank)


def tell_written_weights(step: str, graph: OpGraph) -> None:
    """Says which variables of a model a step writes outside its layers, which it does for every microbatch.

    Args:
        step: words for the step.
        graph: the step, traced for a microbatch.
    """
    written = {
        index for node in graph.nodes if not node.call for index in node.writes if graph.variables[index].in_model
    }
    if written:
        names = ", ".join(repr(graph.variables[index].name) for index in sorted(written))
        tell_unchecked(step, f"it writes {names} of the model outside of layers, once for each microbatch")


def check_gradient_uses(step: str, graph: OpGraph) -> None:
    """Raises an error where a step's result from gradients differs from that of their average over microbatches.

    Args:
        step: words for the step.
        graph: the step, traced for a microbatch.

    Raises:
        StepError: there is such a result.
    """
    uses = {use.op: use for use in nonlinear_uses(graph)}
    if uses:
        use = next(iter(uses.values()))
        _report(
            step,
            [
                f"Between taking gradients and applying them it computes op {use.op!r} ({use.kind}), which is not "
                f"linear in them: of microbatches it gives something else than of the whole batch, whose gradient is "
                f"the average over its microbatches. To clip, give the optimizer clipnorm, global_clipnorm or "
                f"clipvalue: it gets the average. For all else write a loop of your own over @smp.step, which gives "
                f"you the average."
            ],
        )


def _report(step: str, found: Sequence[str]) -> None:
    report(f"{step} is another training in microbatches than for a whole batch", found, _WAY_OUT)


def _size_of(values: Sequence[np.ndarray]) -> float:
    """Returns the size of the numbers that results are sums of."""
    floats = [v for v in values if v.size and tf.as_dtype(v.dtype).is_floating]
    means = [float(np.abs(v.astype(np.float64)).mean()) for v in floats]
    return max((mean for mean in means if np.isfinite(mean)), default=0.0)


def _short(value: np.ndarray) -> str:
    """Returns a number, or the numbers of an array, in a few characters."""
    return f"{float(value):.6g}" if value.ndim == 0 else np.array2string(value, precision=4, threshold=6)


def _numbers_in(noted: NotedTrace) -> dict[str, tuple[Tensor, ...]]:
    """Returns, by name, the tensors of a trace whose sum is a loss, or a log that no state is in."""
    graph, targets = noted.trace.lowered.graph, noted.calls.targets
    found: dict[str, tuple[Tensor, ...]] = {}
    for number, tensors in enumerate(targets, start=1):
        places = [(graph.number_of.get(t.op.name), t.value_index) for t in tensors]
        there = tuple(Tensor(node, index) for node, index in places if node is not None)
        if there and len(there) == len(tensors) and there not in found.values():
            found[f"loss number {number}" if len(targets) > 1 else "loss"] = there
    for name, slot in named_leaves(noted.trace.lowered.results["results"]):
        if isinstance(slot, OutputSlot) and slot.spec is None:
            tensor = graph.outputs[slot.outputs[0]]
            if tf.as_dtype(graph.type_of(tensor).dtype).is_floating and not follows_state(graph, tensor):
                found[f"log {name!r}"] = (tensor,)
    return found
