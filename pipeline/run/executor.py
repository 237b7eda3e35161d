"""Write one rank's program of a step into the graph that is being traced.

The task list decides what runs and in which order; a table maps each kind of task to the emitter of its ops. Compute
tasks are chained by control edges; sends and receives hang on data and on their place in the list, so they overlap
with compute:

    begin ─▶ clear sums ─▶ F0 ─▶ F1 ─▶ B0 ─▶ F2 ─▶ B1 ─▶ B2 ─▶ take sums ─▶ computed ─▶ end
                            └▶S0.0└▶S0.1  ▲         ▲               └─▶ reduce ──────────▲
                                   R1.0 ──┘  R1.1 ──┘      (a receive is posted one task before its reader)

TensorFlow's automatic control dependencies would chain sends and receives in program order, which deadlocks two ranks
that wait for each other; so every op made here is exempt from them, and two fences that hold the handles of all
variables, at the begin and where all is computed, order the step against what the caller does before and after it. An
optimizer so changes the weights of one bucket while others are still averaged; the next step begins behind the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from smp_tf.ops import send_recv
from smp_tf.ops.at_run_time import at_run_time
from smp_tf.partition.graph.op_graph import ARGUMENT, CAPTURE, SEED, Tensor
from smp_tf.partition.split.segment_graph import tensor_name
from smp_tf.partition.split.split import Transfer
from smp_tf.partition.split.step_outputs import StepOutputPlan
from smp_tf.pipeline.run.function_calls import FunctionCalls
from smp_tf.pipeline.run.host import on_device
from smp_tf.pipeline.run.marks import begin_task, end_task
from smp_tf.pipeline.run.reduction import Bucket, parts_of
from smp_tf.pipeline.run.stage_program import StageProgram
from smp_tf.pipeline.task import Kind, Task


@dataclass
class StepResults:
    """What a rank's program produced, by position in the graph's outputs.

    Args:
        values: per output one tensor per microbatch; None where another rank keeps them.
        accumulated: per gradient output the sum over microbatches (and replicas) of weight x value; None elsewhere.
        step: number of the step, an int64 scalar tensor.
        computed: an op that has run when all of this rank has but the averages over replicas: variables may change.
        buckets: by position, in which bucket a gradient was averaged over the replicas.
    """

    values: list[list[tf.Tensor] | None]
    accumulated: list[tf.Tensor | None]
    step: tf.Tensor
    computed: tf.Operation
    buckets: Mapping[int, int]


def emit(
    program: StageProgram,
    arguments: Callable[[int, int], tf.Tensor],
    captures: Sequence[tf.Tensor],
    seed: Callable[[int], tf.Tensor],
    weights: Sequence[Any],
    *,
    beside: Callable[[tf.Tensor], Sequence[tf.Operation]] | None = None,
) -> StepResults:
    """Write the program into the current graph.

    Args:
        program: this rank's program.
        arguments: gives argument tensor number i of microbatch m.
        captures: the outside tensors of CAPTURE nodes.
        seed: gives the random seed of microbatch m, int64[2].
        weights: weight of each microbatch in sums (scalars), where the program is weighted.
        beside: writes more into the graph, given the number of the step, whose op it has to wait for where it reads
            variables; returns the ops that have to run before variables change.

    Returns:
        The outputs this rank has.
    """
    return _Emitter(program, arguments, captures, seed, weights, beside).run()


@dataclass
class _Emitter:
    program: StageProgram
    arguments: Callable[[int, int], tf.Tensor]
    captures: Sequence[tf.Tensor]
    seed: Callable[[int], tf.Tensor]
    weights: Sequence[Any]
    beside: Callable[[tf.Tensor], Sequence[tf.Operation]] | None
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

    def run(self) -> StepResults:
        split = self.program.split
        self.transfers: Mapping[int, Transfer] = {t.index: t for t in split.transfers}
        emitters: dict[Kind, Callable[[Task], None]] = {
            Kind.F: self._compute,
            Kind.B: self._compute,
            Kind.I: self._compute,
            Kind.W: self._compute,
            Kind.T: self._compute,
            Kind.SEND: self._send,
            Kind.RECV: self._receive,
        }
        handles = [v.handle for v in self.program.variables.values()]
        self.step = send_recv.begin_step(handles, self.program.number)
        if self.beside is not None:
            self.all_ops += self.beside(self.step)
        self._clear_sums()
        for index, task in enumerate(self.program.tasks):
            emitters[task.kind](task)
            for bucket in self.program.buckets:
                if bucket.after == index:
                    self._reduce(bucket)
        accumulated = [self._total(position) for position in range(len(split.outputs))]
        with tf.control_dependencies(self.all_ops):
            computed = at_run_time(self.step, handles).op
        with tf.control_dependencies([computed, *self.averages]):
            send_recv.end_step(self.program.number)
        values: list[list[tf.Tensor] | None] = []
        for output in split.outputs:
            per_microbatch = [self.values.get((output.tensor, m)) for m in range(self.program.microbatches)]
            is_sum = output.tensor in self.program.summed - self.program.kept
            values.append(None if is_sum or any(v is None for v in per_microbatch) else per_microbatch)
        buckets = {position: bucket.number for bucket in self.program.buckets for position in bucket.positions}
        return StepResults(values, accumulated, self.step, computed, buckets)

    def _total(self, position: int) -> tf.Tensor | None:
        """What this rank has of an output's sum over the microbatches, and over the replicas where there are more."""
        output = self.program.split.outputs[position]
        if not output.gets_sum(self.program.stage, self.program.split.placement):
            return None
        return self.reduced.get(position) if self.program.reduction is not None else self._own_total(output)

    def _own_total(self, output: StepOutputPlan) -> tf.Tensor:
        parts = [self._sum(t) for t in parts_of(output)]
        with on_device(self.program.sums_on):
            return tf.add_n(parts) if len(parts) > 1 else parts[0]

    def _reduce(self, bucket: Bucket) -> None:
        """Begin a bucket, all of whose gradients are complete now."""
        assert self.program.reduction is not None
        sums = [self._own_total(self.program.split.outputs[position]) for position in bucket.positions]
        reduced, there = self.program.reduction.reduced(sums, bucket, self.step)
        self.reduced.update(zip(self.program.reduction.positions_here(bucket), reduced, strict=True))
        self.averages.append(there)

    def _clear_sums(self) -> None:
        """Begin the sums that the functions add to, before the first of them runs."""
        cleared = [accumulator.clear(self.step.op) for accumulator in self.program.accumulators.values()]
        if cleared:
            with tf.control_dependencies(cleared):
                self.last_compute = tf.no_op()

    def _sum(self, tensor: Tensor) -> tf.Tensor:
        """A tensor's sum over the microbatches, which is complete now."""
        if tensor not in self.accumulated:
            assert self.last_compute is not None
            self.accumulated[tensor], freed = self.program.accumulators[tensor].take(self.last_compute)
            self.all_ops.append(freed)
        return self.accumulated[tensor]

    def _compute(self, task: Task) -> None:
        assert task.microbatch is not None
        function = self.program.function_of(task)
        if function is None:
            return
        microbatch = task.microbatch
        inputs = [self._value(t, microbatch) for t in function.arguments]
        inputs += [self.remote[v] for v in function.remote_values]
        if function.weighted:
            inputs.append(tf.cast(self.weights[microbatch], tf.float64))
        if function.early is not None:
            inputs.append(self.step)
        number = self.program.number
        with tf.name_scope(str(task)):
            begun = begin_task(task, self.step, number, [*self._after(), *self._not_computed(inputs)])
            with tf.control_dependencies([begun]):
                call = self.calls.add(function, inputs)
            self.last_compute = end_task(task, self.step, number, call)
        self.called.add(call.name)
        self.all_ops.append(self.last_compute)
        for tensor, result in zip(function.outputs, call.outputs, strict=False):
            self._set_shape(result, tensor)
            self.values[tensor, microbatch] = result
            if tensor in self.program.summed - self.program.accumulators.keys():
                self._accumulate(tensor, microbatch, result)
        if function.early is not None:
            # Behind the task's begin: a pass that puts ops together would otherwise see nothing between what the task
            # waits for and what waits for this, make one op of both, and that would wait for itself.
            with tf.control_dependencies([begun]):
                self.accumulated.update(function.early.take(self.program.split.graph, self.step))

    def _set_shape(self, result: tf.Tensor, tensor: Tensor) -> None:
        """Say what is known of a result, of which its call says nothing."""
        result.set_shape(self.program.split.graph.type_of(tensor).shape)

    def _not_computed(self, inputs: Sequence[tf.Tensor]) -> list[tf.Operation]:
        """What makes these inputs, other than the tasks, which come after one another, and what is there already."""
        makers = {tensor.op.name: tensor.op for tensor in inputs if tf.is_symbolic_tensor(tensor)}
        return [op for name, op in makers.items() if name not in self.called]

    def _after(self) -> list[tf.Operation]:
        return [self.last_compute] if self.last_compute is not None else [self.step.op]

    def _value(self, tensor: Tensor, microbatch: int) -> tf.Tensor:
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

    def _accumulate(self, tensor: Tensor, microbatch: int, value: tf.Tensor) -> None:
        """Add up in this graph what has no accumulator."""
        if self.program.weighted:
            value = value * tf.cast(self.weights[microbatch], value.dtype)
        total = self.accumulated.get(tensor)
        with on_device(self.program.sums_on):
            self.accumulated[tensor] = value if total is None else total + value

    def _label(self, transfer: Transfer) -> str:
        graph, placement = self.program.split.graph, self.program.split.placement
        if transfer.tensor is not None:
            what = tensor_name(graph, transfer.tensor)
        else:
            assert transfer.variable is not None
            what = f"value of {graph.variables[transfer.variable].name}"
        return f"{what} (stage {placement[transfer.src_chunk]} to {placement[transfer.dst_chunk]})"

    def _rank_of(self, chunk: int) -> int:
        return self.program.ranks[self.program.split.placement[chunk]]

    def _send(self, task: Task) -> None:
        assert task.edge is not None
        transfer = self.transfers[task.edge]
        # When its maker has ended, to the clock as well.
        after = self._after()
        if transfer.is_sum:
            assert transfer.tensor is not None
            value = self._sum(transfer.tensor)
        elif transfer.tensor is not None:
            value = self.values[transfer.tensor, task.microbatch]
        else:
            assert transfer.variable is not None
            with tf.control_dependencies([self.step.op]):
                value = self.program.variables[transfer.variable].read_value()
            after = [self.step.op]
        with tf.control_dependencies(after):
            op = send_recv.send(
                value,
                self.step,
                dest=self._rank_of(transfer.dst_chunk),
                program=self.program.number,
                edge=transfer.index,
                microbatch=task.microbatch or 0,
                label=self._label(transfer),
            )
        self.all_ops.append(op)

    def _receive(self, task: Task) -> None:
        assert task.edge is not None
        transfer = self.transfers[task.edge]
        graph = self.program.split.graph
        if transfer.tensor is not None:
            kind = graph.type_of(transfer.tensor)
        else:
            assert transfer.variable is not None
            kind = graph.variables[transfer.variable].type
        with tf.control_dependencies(self._after()):
            value = send_recv.recv(
                self.step,
                tf.dtypes.as_dtype(kind.dtype),
                tf.TensorShape(kind.shape),
                src=self._rank_of(transfer.src_chunk),
                program=self.program.number,
                edge=transfer.index,
                microbatch=task.microbatch or 0,
                label=self._label(transfer),
            )
        self.all_ops.append(value.op)
        if transfer.is_sum:
            assert transfer.tensor is not None
            self.accumulated[transfer.tensor] = value
        elif transfer.tensor is not None:
            self.values[transfer.tensor, task.microbatch] = value
        else:
            assert transfer.variable is not None
            self.remote[transfer.variable] = value
