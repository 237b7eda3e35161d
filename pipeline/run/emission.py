"""What is known while one rank's program is written into a graph: the existing values, and what comes after what.

The emitters of the tasks share it. Each takes from here what its task reads, and puts here what it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from smp_tf.partition.graph.op_graph import ARGUMENT, CAPTURE, SEED, Tensor
from smp_tf.partition.split.segment_graph import tensor_name
from smp_tf.partition.split.split import Transfer
from smp_tf.partition.split.step_outputs import StepOutputPlan
from smp_tf.pipeline.run.function_calls import FunctionCalls
from smp_tf.pipeline.run.host import on_device
from smp_tf.pipeline.run.reduction import Bucket, parts_of
from smp_tf.pipeline.run.replica_sums import give_nothing
from smp_tf.pipeline.run.stage_program import StageProgram

#: Given the bucket, its parts by position and microbatch, and the number of the step.
SumSparse = Callable[[Bucket, Sequence[list[tf.Tensor]], tf.Tensor], None]


@dataclass(frozen=True)
class CallersPart:
    """Writes the tasks whose content only the caller of the program knows.

    Each writes ops into the graph, given the number of the step. It is None where the list has no such task.

    Args:
        weigh: writes the sum over the replicas of how much their gradients count. It waits for the op of the number
            where it reads variables, and returns the ops that have to run before variables change.
        check: writes the check of the batch.
        sum_sparse: writes the sum of a sparse gradient over the replicas.
        call_number: returns the number by which all replicas know the call of the step, for sums over them within
            segments.
        gather: takes the index of a variable whose parts are on several ranks, and gives its whole value for one use.
            Every use asks anew, where its task comes in the list. The ops must not be merged over uses.
    """

    weigh: Callable[[tf.Tensor], Sequence[tf.Operation]] | None = None
    check: Callable[[tf.Tensor], None] | None = None
    sum_sparse: SumSparse | None = None
    call_number: Callable[[tf.Tensor], tf.Tensor] | None = None
    gather: Callable[[int], tf.Tensor] | None = None


@dataclass
class Emission:
    """The state of writing a program.

    Args:
        program: this rank's program.
        arguments: returns argument tensor number i of microbatch m.
        captures: the outside tensors of CAPTURE nodes.
        seed: returns the random seed of microbatch m.
        weights: weight of each microbatch in sums, where the program is weighted.
        step: number of the step.
        callers: writes the tasks whose content only the caller knows.
        values: tensors that compute tasks made and RECVs brought, by tensor and microbatch.
        remote: values of other stages' variables, by index.
        seeds: seeds of the microbatches that needed one.
        accumulated: sums over the microbatches.
        reduced: sums over the replicas, by position among the outputs.
        calls: calls of the functions.
        called: names of the calls' ops.
        all_ops: ops that have to run before variables change.
        averages: ops that have to run before the step ends.
        last_compute: what the next compute task comes after; None while there is none.
        update: lets the optimizer write its update of all weights; None where that is done, or not this program's.
        join: brings together what the replicas have made of their samples.
        joined: what came of it.
        log: writes the average over the replicas of what is logged of a batch.
        logged: what came of it.
        call_number: the number by which all replicas know the call of the step; None until a task asks for it.
    """

    program: StageProgram
    arguments: Callable[[int, int], tf.Tensor]
    captures: Sequence[tf.Tensor]
    seed: Callable[[int], tf.Tensor]
    weights: Sequence[Any]
    step: tf.Tensor
    callers: CallersPart = CallersPart()
    values: dict[tuple[Tensor, int | None], tf.Tensor] = field(default_factory=dict)
    remote: dict[int, tf.Tensor] = field(default_factory=dict)
    seeds: dict[int, tf.Tensor] = field(default_factory=dict)
    accumulated: dict[Tensor, tf.Tensor] = field(default_factory=dict)
    reduced: dict[int, tf.Tensor] = field(default_factory=dict)
    calls: FunctionCalls = field(default_factory=FunctionCalls)
    called: set[str] = field(default_factory=set)
    all_ops: list[tf.Operation] = field(default_factory=list)
    averages: list[tf.Operation] = field(default_factory=list)
    last_compute: tf.Operation | None = None
    update: Callable[[], None] | None = None
    join: Callable[[], Any] | None = None
    joined: Any = None
    log: Callable[[], Any] | None = None
    logged: Any = None
    call_number: tf.Tensor | None = None

    def __post_init__(self) -> None:
        self.transfers: Mapping[int, Transfer] = {t.index: t for t in self.program.split.transfers}

    def total(self, position: int) -> tf.Tensor | None:
        """Returns this rank's part of an output's sum over the microbatches and replicas."""
        output = self.program.split.outputs[position]
        if not output.gets_sum(self.program.stage, self.program.split.placement):
            return None
        return self.reduced.get(position) if self.program.reduction is not None else self.own_total(output)

    def own_total(self, output: StepOutputPlan) -> tf.Tensor:
        """Returns this rank's part of an output's sum over the microbatches."""
        parts = [self.sum_of(t) for t in parts_of(output)]
        with on_device(self.program.sums.device):
            return tf.add_n(parts) if len(parts) > 1 else parts[0]

    def clear_sums(self) -> None:
        """Begins the sums that the functions add to, before the first of them runs."""
        cleared = [accumulator.clear(self.step.op) for accumulator in self.program.sums.accumulators.values()]
        if cleared:
            with tf.control_dependencies(cleared):
                self.last_compute = tf.no_op()

    def begin_replica_sums(self) -> None:
        """Begins the sums over the replicas for microbatches that other replicas have and this one does not."""
        ends, sums = self.program.end.replicas, self.program.replica_sums
        missing = range(self.program.microbatches, ends.most) if ends is not None else range(0)
        if ends is not None and sums and missing:
            graph = self.program.split.graph
            self.all_ops += give_nothing(graph, sums, ends, missing, self._known_call())

    def for_replica_sums(self, microbatch: int) -> list[tf.Tensor]:
        """Returns what is passed to a function for its sums over the replicas, in the order of `PASSED`."""
        weight = self.weights[microbatch]
        return [self._known_call(), tf.constant(microbatch, tf.int64), tf.cast(weight, tf.float64)]

    def _known_call(self) -> tf.Tensor:
        if self.call_number is None:
            assert self.callers.call_number is not None
            self.call_number = self.callers.call_number(self.step)
        return self.call_number

    def sum_of(self, tensor: Tensor) -> tf.Tensor:
        """Returns a tensor's sum over the microbatches, which is now complete."""
        if tensor not in self.accumulated:
            assert self.last_compute is not None
            self.accumulated[tensor], freed = self.program.sums.accumulators[tensor].take(self.last_compute)
            self.all_ops.append(freed)
        return self.accumulated[tensor]

    def set_shape(self, result: tf.Tensor, tensor: Tensor) -> None:
        """Sets the known shape of a result, about which its call says nothing."""
        result.set_shape(self.program.split.graph.type_of(tensor).shape)

    def not_computed(self, inputs: Sequence[tf.Tensor]) -> list[tf.Operation]:
        """Returns what makes these inputs, other than tasks, which come after one another, and what is there."""
        makers = {tensor.op.name: tensor.op for tensor in inputs if tf.is_symbolic_tensor(tensor)}
        return [op for name, op in makers.items() if name not in self.called]

    def after(self) -> list[tf.Operation]:
        """Returns what the next compute task comes after."""
        return [self.last_compute] if self.last_compute is not None else [self.step.op]

    def value_of(self, tensor: Tensor, microbatch: int) -> tf.Tensor:
        """Returns a tensor of a microbatch, which exists by now."""
        node = self.program.split.graph.nodes[tensor.node]
        if node.op == ARGUMENT:
            assert node.source is not None
            return self.arguments(node.source, microbatch)
        if node.op == CAPTURE:
            assert node.source is not None
            return self.captures[node.source]
        if node.op == SEED:
            if microbatch not in self.seeds:
                self.seeds[microbatch] = self.seed(microbatch)
            return self.seeds[microbatch]
        return self.values[tensor, microbatch]

    def whole_value(self, variable: int) -> tf.Tensor:
        """Returns the whole value of a variable whose parts are on several ranks, brought together now for one use."""
        assert self.callers.gather is not None
        with tf.control_dependencies(self.after()):
            return self.callers.gather(variable)

    def accumulate(self, tensor: Tensor, microbatch: int, value: tf.Tensor) -> None:
        """Adds up, in this graph, tensors without an accumulator."""
        if self.program.sums.is_weighted:
            value = value * tf.cast(self.weights[microbatch], value.dtype)
        total = self.accumulated.get(tensor)
        with on_device(self.program.sums.device):
            self.accumulated[tensor] = value if total is None else total + value

    def label_of(self, transfer: Transfer) -> str:
        """Returns words for a transfer."""
        graph, placement = self.program.split.graph, self.program.split.placement
        if transfer.tensor is not None:
            what = tensor_name(graph, transfer.tensor)
        else:
            assert transfer.variable is not None
            what = f"value of {graph.variables[transfer.variable].name}"
        return f"{what} (stage {placement[transfer.src_chunk]} to {placement[transfer.dst_chunk]})"

    def rank_of(self, chunk: int) -> int:
        """Returns the world rank that runs a chunk."""
        return self.program.end.ranks[self.program.split.placement[chunk]]
