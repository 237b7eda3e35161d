"""Makes a segment a TensorFlow function, which is traced once and called once per microbatch.

The function takes what the segment needs from outside as arguments: microbatch slices, received tensors, stash,
captured tensors, the seed, and values of variables. These are variables of other stages, and for each use those whose
parts are on several ranks of this stage. Handles of the other variables of its stage are captured. A tensor that is
only summed over the microbatches is added to its sum within the function, and not returned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from smp_tf.partition import tf_internals
from smp_tf.partition.graph.op_graph import VARIABLE, OpGraph, Tensor, TensorType
from smp_tf.partition.split.segment_graph import remote_value_name, segment_graph, tensor_name, use_name
from smp_tf.partition.split.split import Segment
from smp_tf.pipeline.run.accumulator import Accumulator
from smp_tf.pipeline.run.early_sums import EarlySums
from smp_tf.pipeline.run.host import on_device
from smp_tf.pipeline.run.replica_sums import PASSED, ReplicaEnds, independent, passed_specs, sums_in, written_out


@dataclass(frozen=True)
class Summing:
    """What a segment's function does with tensors that are summed over the microbatches.

    Args:
        accumulators: the sums that it adds to itself, by the tensor to add.
        is_weighted: whether what it adds is multiplied by a weight, which is passed at every call.
        early: sums to give as soon as this call has completed them; None for none.
        returned: tensors that it returns and the caller adds up.
        device: the device of the returned tensors; None for where they are made.
    """

    accumulators: Mapping[Tensor, Accumulator] = field(default_factory=dict)
    is_weighted: bool = False
    early: EarlySums | None = None
    returned: Collection[Tensor] = ()
    device: str | None = None


@dataclass(frozen=True)
class Signature:
    """What a segment's function takes, in order.

    Args:
        arguments: the tensors to pass: those of source nodes, then the segment's inputs.
        remote_values: variables of other stages, whose value is passed after them.
        uses: nodes that read a variable whose parts are on several ranks. Its whole value is passed for each, then.
        has_replica_sums: whether what its sums over the replicas need is passed after them (`replica_sums.PASSED`).
        is_weighted: whether the weight (a float64 scalar) of what the function adds to sums is passed after them.
        has_step: whether the number of the step is passed last, as it is where the function gives sums early.
    """

    arguments: tuple[Tensor, ...]
    remote_values: tuple[int, ...]
    uses: tuple[int, ...]
    is_weighted: bool
    has_step: bool
    has_replica_sums: bool = False

    def specs(self, graph: OpGraph) -> list[tf.TensorSpec]:
        """Returns the types of what is passed.

        Args:
            graph: the op graph.
        """
        specs = [_spec(graph.type_of(t), f"smp_argument_{i}") for i, t in enumerate(self.arguments)]
        specs += [_spec(graph.variables[v].type, f"smp_value_{v}") for v in self.remote_values]
        specs += [_spec(graph.variables[graph.nodes[n].reads[0]].type, f"smp_use_{n}") for n in self.uses]
        if self.has_replica_sums:
            specs += passed_specs()
        if self.is_weighted:
            specs.append(tf.TensorSpec([], tf.float64, name="smp_weight"))
        if self.has_step:
            specs.append(tf.TensorSpec([], tf.int64, name="smp_step"))
        return specs

    def by_name(self, graph: OpGraph, passed: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
        """Returns what is passed for tensors of the graph, by their names.

        Args:
            graph: the op graph.
            passed: all that is passed.
        """
        names = [tensor_name(graph, t) for t in self.arguments]
        names += [remote_value_name(graph, v) for v in self.remote_values]
        names += [use_name(graph, n) for n in self.uses]
        names += PASSED if self.has_replica_sums else ()
        return dict(zip(names, passed, strict=False))

    def weight_in(self, passed: Sequence[tf.Tensor]) -> tf.Tensor | None:
        """Returns the weight that is passed; None where none is.

        Args:
            passed: all that is passed.
        """
        values = len(self.arguments) + len(self.remote_values) + len(self.uses)
        values += len(PASSED) if self.has_replica_sums else 0
        return passed[values] if self.is_weighted else None


@dataclass(frozen=True)
class SegmentFunction:
    """A segment that can be called.

    Args:
        segment: the segment that it runs.
        takes: what is passed to it.
        variables: indices of the variables whose handle it holds.
        outputs: the tensors it returns, in order.
        early: the sums that it gives before it ends; None for none.
        function: the traced function, without its graph.
        compiled: whether XLA compiles it.
        uncompiled: why XLA does not compile it although it was asked to; else None.
    """

    segment: Segment
    takes: Signature
    variables: tuple[int, ...]
    outputs: tuple[Tensor, ...]
    early: EarlySums | None
    function: tf_internals.TracedFunction
    compiled: bool = False
    uncompiled: str | None = None


def _spec(kind: TensorType, name: str) -> tf.TensorSpec:
    return tf.TensorSpec(kind.shape, tf.dtypes.as_dtype(kind.dtype), name=name)


def build_segment_function(
    graph: OpGraph,
    segment: Segment,
    variables: Mapping[int, tf.Variable],
    *,
    outputs: tuple[Tensor, ...] | None = None,
    summing: Summing | None = None,
    replicas: ReplicaEnds | None = None,
    xla: bool = False,
    samples: int = 1,
) -> SegmentFunction:
    """Traces a segment into a function.

    Args:
        graph: the op graph.
        segment: the segment.
        variables: the variables whose handle may be used here, by index in the graph.
        outputs: what to return; by default all that others need.
        summing: what becomes of tensors that are summed over the microbatches; None where that is the caller's alone.
        replicas: whom its sums over the replicas are made with; None where it is measured alone, or has none.
        xla: whether to compile the function with XLA, where XLA can.
        samples: samples of a microbatch, where the graph leaves that length open; only to ask XLA whether it can.

    Returns:
        The function, with the list of what to pass to it.
    """
    outputs = segment.outputs if outputs is None else outputs
    body = _Body(graph, segment, variables, outputs, summing or Summing(), replicas)
    specs = body.takes.specs(graph)

    def run(*passed: tf.Tensor) -> list[tf.Tensor]:
        return body.results(passed)

    def run_without_sums(*passed: tf.Tensor) -> list[tf.Tensor]:
        # XLA is asked with these, since the variables that hold the sums are empty between two steps.
        return body.computed(passed)

    run.__name__ = f"chunk_{segment.chunk}_sweep_{segment.sweep}"
    uncompiled = tf_internals.why_xla_cannot(_traced(run_without_sums, True), specs, samples) if xla else None
    compiled = xla and uncompiled is None
    return SegmentFunction(
        segment,
        body.takes,
        tuple(body.handles.values()),
        body.outputs,
        body.summing.early,
        tf_internals.TracedFunction(_traced(run, compiled or None).get_concrete_function(*specs), body.calls),
        compiled,
        uncompiled,
    )


def _traced(body: Callable[..., Any], jit_compile: bool | None) -> Any:
    return tf.function(body, autograph=False, jit_compile=jit_compile, experimental_attributes={"_noinline": True})


class _Body:
    """Writes the body of a segment's function into the graph that is being traced.

    Args:
        graph: the op graph.
        segment: the segment.
        variables: the variables whose handle may be used here, by index in the graph.
        outputs: what to return.
        summing: what becomes of tensors that are summed.
        replicas: whom its sums over the replicas are made with; None for nobody.
    """

    def __init__(
        self,
        graph: OpGraph,
        segment: Segment,
        variables: Mapping[int, tf.Variable],
        outputs: tuple[Tensor, ...],
        summing: Summing,
        replicas: ReplicaEnds | None,
    ) -> None:
        self.graph, self.variables, self.outputs, self.summing = graph, variables, outputs, summing
        sources = [Tensor(n, 0) for n in segment.sources if graph.nodes[n].op != VARIABLE]
        #: The variable of each node that stands for a handle.
        self.handles = {n: _variable_of(graph, n) for n in segment.sources if graph.nodes[n].op == VARIABLE}
        given_early = summing.early.tensors if summing.early is not None else ()
        over_replicas = sums_in(graph, segment)
        self.takes = Signature(
            (*sources, *segment.inputs),
            segment.remote_values,
            segment.uses,
            is_weighted=summing.is_weighted and bool(summing.accumulators or given_early),
            has_step=summing.early is not None,
            has_replica_sums=bool(over_replicas) and replicas is not None,
        )
        self._wanted = tuple(dict.fromkeys((*outputs, *summing.accumulators, *given_early)))
        self._definition = segment_graph(graph, segment, variables)
        if over_replicas:
            self._definition = written_out(self._definition, over_replicas, replicas)
        #: The functions that it calls.
        self.calls = tf_internals.KeptFunctions(self._definition.library.function)

    def computed(self, passed: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns what the function returns and what it sums.

        Args:
            passed: all that the function is passed.
        """
        graph, current = self.graph, tf_internals.current_graph()
        given = self.takes.by_name(graph, passed)
        for number, variable in self.handles.items():
            handle = tf_internals.capture(current, self.variables[variable].handle)
            given[tensor_name(graph, Tensor(number, 0))] = handle
        imported = [name for t in self._wanted if (name := tensor_name(graph, t)) not in given]
        used = {name for node in self._definition.node for name in map(_with_port, node.input)}
        made = tf.graph_util.import_graph_def(
            self._definition,
            input_map={name: value for name, value in given.items() if name in used},
            return_elements=imported,
            name="",
        )
        independent(current, self._definition)
        given.update(zip(imported, made or (), strict=True))
        return [given[tensor_name(graph, t)] for t in self._wanted]

    def results(self, passed: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the results, after the sums were added to and those that are given early were given.

        Args:
            passed: all that the function is passed.
        """
        summing, weight = self.summing, self.takes.weight_in(passed)
        values = dict(zip(self._wanted, self.computed(passed), strict=True))

        def counted(tensor: Tensor) -> tf.Tensor:
            value = values[tensor]
            return value if weight is None else value * tf.cast(weight, value.dtype)

        added = {tensor: accumulator.add(counted(tensor)) for tensor, accumulator in summing.accumulators.items()}

        def sum_of(tensor: Tensor) -> tf.Tensor:
            return summing.accumulators[tensor].take(added[tensor])[0] if tensor in added else counted(tensor)

        with on_device(summing.device):
            # Copied as they are made: until the function returns, all of them would be on the device together.
            is_copied = summing.returned if summing.device else ()
            results = [tf.identity(values[t]) if t in is_copied else values[t] for t in self.outputs]
        if summing.early is not None:
            summing.early.give(sum_of, passed[-1])
        return results


def _variable_of(graph: OpGraph, number: int) -> int:
    variable = graph.nodes[number].source
    assert variable is not None
    return variable


def _with_port(name: str) -> str:
    return name if name.startswith("^") or ":" in name else f"{name}:0"
