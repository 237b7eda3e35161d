"""Write one rank's program of a step into the graph that is being traced.

The task list decides what runs and in which order; a table maps each kind of task to the emitter of its ops. Compute
tasks are chained by control edges; sends and receives hang on data and on their place in the list, so they overlap
with compute:

    begin ─▶ clear sums ─▶ F0 ─▶ F1 ─▶ B0 ─▶ F2 ─▶ B1 ─▶ B2 ─▶ take sums ─▶ end
                            └▶S0.0└▶S0.1  ▲         ▲
                                   R1.0 ──┘  R1.1 ──┘      (a receive is posted one task before its reader)

TensorFlow's automatic control dependencies would chain sends and receives in program order, which deadlocks two ranks
that wait for each other; so every op made here is exempt from them, and a pair of fences that hold the handles of all
variables orders the step against what the caller does before and after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from smp_tf.ops import send_recv
from smp_tf.ops.graph_op import add_op
from smp_tf.partition import tf_internals
from smp_tf.partition.op_graph import ARGUMENT, CAPTURE, SEED, Tensor
from smp_tf.partition.op_kinds import CALL_OPS
from smp_tf.partition.segment_graph import tensor_name
from smp_tf.partition.split import Segment, Split, StepOutputPlan, Transfer
from smp_tf.pipeline.accumulator import Accumulator, fits
from smp_tf.pipeline.check import check
from smp_tf.pipeline.marks import begin_task, end_task
from smp_tf.pipeline.schedule import add_transfers, program_of
from smp_tf.pipeline.segment_function import SegmentFunction, build_segment_function
from smp_tf.pipeline.task import Edge, Kind, Program, Task


@dataclass(frozen=True)
class StageProgram:
    """What one rank runs in a step: its task list and the functions the tasks call.

    Args:
        split: the cut step.
        stage: the stage of this rank.
        ranks: world rank of every stage of this replica.
        tasks: the tasks of this stage, in order.
        functions: this stage's segments as functions, by chunk, sweep and part of it.
        summed: the tensors made here of which only, or also, the sum over the microbatches is wanted.
        kept: those of them whose value per microbatch is wanted too.
        accumulators: the sums that the functions add to themselves; other sums are added up in the caller's graph.
        weighted: whether microbatches weigh differently in sums.
        number: program number, equal on all ranks, first part of every message's tag.
        microbatches: number of microbatches.
        variables: TensorFlow variables by index in the op graph.
    """

    split: Split
    stage: int
    ranks: tuple[int, ...]
    tasks: tuple[Task, ...]
    functions: Mapping[tuple[int, int, int], SegmentFunction]
    summed: frozenset[Tensor]
    kept: frozenset[Tensor]
    accumulators: Mapping[Tensor, Accumulator]
    weighted: bool
    number: int
    microbatches: int
    variables: Mapping[int, tf.Variable]


def plan_program(split: Split, schedule: str, microbatches: int) -> Program:
    """The tasks of all stages for a cut step, transfers included.

    Args:
        split: the cut step.
        schedule: name or text of the schedule.
        microbatches: number of microbatches.

    Returns:
        One task list per stage, which was checked to have every task once, in order, and to end.
    """
    edges = edges_of(split)
    sweeps = max(2, split.sweeps)
    kind = schedule if any(sweep == 1 for _, sweep, _ in split.segments) else "simple"
    program = add_transfers(program_of(kind, split.placement, microbatches, sweeps=sweeps), edges)
    check(program, edges)
    return program


def edges_of(split: Split) -> list[Edge]:
    """What flows between the chunks of a cut step, as a program names it; what stays on a rank is not sent."""
    return [
        Edge(
            t.index, t.src_chunk, t.src_sweep, t.dst_chunk, t.dst_sweep,
            "step" if t.once_per_step else "microbatch",
        )
        for t in (*split.transfers, *split.handed_on)
    ]  # fmt: skip


def build_stage_program(
    split: Split,
    stage: int,
    ranks: Sequence[int],
    program: Program,
    number: int,
    variables: Mapping[int, tf.Variable],
    *,
    keep: frozenset[int] = frozenset(),
    weighted: bool = False,
    xla: bool = False,
    samples: int = 1,
) -> StageProgram:
    """Trace the functions of one stage.

    Args:
        split: the cut step.
        stage: which stage.
        ranks: world rank of every stage.
        program: the tasks of all stages.
        number: program number, equal on all ranks.
        variables: the variables whose handles this rank may use, by index in the op graph.
        keep: positions of gradient outputs whose value per microbatch is wanted beside their sum.
        weighted: whether microbatches weigh differently in sums.
        xla: compile the functions with XLA, where XLA can.
        samples: samples of a microbatch, where the graph leaves that length open.

    Returns:
        The program of this rank.
    """
    segments = split.segments_of(stage)
    made = {t for segment in segments.values() for t in segment.outputs}
    summed = {o.tensor for o in split.outputs if o.is_summed and split.stage_of(o) == stage}
    summed |= {t for o in split.outputs for t in o.summands if t in made}
    kept = frozenset(split.outputs[position].tensor for position in keep) & summed
    # A single microbatch is its own sum.
    accumulators = {
        t: Accumulator(split.graph.type_of(t), f"smp_sum_{number}_{count}")
        for count, t in enumerate(sorted(summed & made))
        if program.microbatches > 1 and fits(split.graph.type_of(t))
    }
    functions = {}
    for when, segment in segments.items():
        own = {t: accumulators[t] for t in segment.outputs if t in accumulators}
        others = [other for other in segments.values() if other is not segment]
        outputs = tuple(t for t in segment.outputs if t not in own or t in kept or _is_read(split, others, t))
        functions[when] = build_segment_function(
            split.graph,
            segment,
            variables,
            outputs=outputs,
            accumulators=own,
            weighted=weighted,
            xla=xla,
            samples=samples,
        )
    return StageProgram(
        split=split,
        stage=stage,
        ranks=tuple(ranks),
        tasks=program.ranks[stage],
        functions=functions,
        summed=frozenset(summed),
        kept=kept,
        accumulators=accumulators,
        weighted=weighted,
        number=number,
        microbatches=program.microbatches,
        variables=variables,
    )


def _is_read(split: Split, others: Sequence[Segment], tensor: Tensor) -> bool:
    """Whether somebody needs a tensor of every microbatch: another segment of the stage, or another stage."""
    return any(tensor in s.inputs for s in others) or any(t.tensor == tensor and not t.is_sum for t in split.transfers)


@dataclass
class StepResults:
    """What a rank's program produced, by position in the graph's outputs.

    Args:
        values: per output one tensor per microbatch; None where another rank keeps them.
        accumulated: per gradient output the sum over microbatches of weight x value; None elsewhere.
        step: number of the step, an int64 scalar tensor.
        done: an op that has run when the whole program of this rank has.
    """

    values: list[list[tf.Tensor] | None]
    accumulated: list[tf.Tensor | None]
    step: tf.Tensor
    done: tf.Operation


def emit(
    program: StageProgram,
    arguments: Callable[[int, int], tf.Tensor],
    captures: Sequence[tf.Tensor],
    seed: Callable[[int], tf.Tensor],
    weights: Sequence[Any],
) -> StepResults:
    """Write the program into the current graph.

    Args:
        program: this rank's program.
        arguments: gives argument tensor number i of microbatch m.
        captures: the outside tensors of CAPTURE nodes.
        seed: gives the random seed of microbatch m, int64[2].
        weights: weight of each microbatch in sums (scalars), where the program is weighted.

    Returns:
        The outputs this rank has.
    """
    return _Emitter(program, arguments, captures, seed, weights).run()


@dataclass
class _Emitter:
    program: StageProgram
    arguments: Callable[[int, int], tf.Tensor]
    captures: Sequence[tf.Tensor]
    seed: Callable[[int], tf.Tensor]
    weights: Sequence[Any]
    values: dict[tuple[Tensor, int | None], tf.Tensor] = field(default_factory=dict)
    remote: dict[int, tf.Tensor] = field(default_factory=dict)
    seeds: dict[int, tf.Tensor] = field(default_factory=dict)
    accumulated: dict[Tensor, tf.Tensor] = field(default_factory=dict)
    first_calls: dict[tuple[int, int, int], _Call] = field(default_factory=dict)
    calls: set[str] = field(default_factory=set)
    all_ops: list[tf.Operation] = field(default_factory=list)
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
        self._clear_sums()
        for task in self.program.tasks:
            emitters[task.kind](task)
        accumulated = [self._total(output) for output in split.outputs]
        with tf.control_dependencies(self.all_ops):
            done = send_recv.end_step(handles, self.program.number)
        values: list[list[tf.Tensor] | None] = []
        for output in split.outputs:
            per_microbatch = [self.values.get((output.tensor, m)) for m in range(self.program.microbatches)]
            is_sum = output.tensor in self.program.summed - self.program.kept
            values.append(None if is_sum or any(v is None for v in per_microbatch) else per_microbatch)
        return StepResults(values, accumulated, self.step, done)

    def _total(self, output: StepOutputPlan) -> tf.Tensor | None:
        """What this rank has of an output's sum over the microbatches."""
        if not output.gets_sum(self.program.stage, self.program.split.placement):
            return None
        parts = [self._sum(t) for t in output.summands or (output.tensor,)]
        return tf.add_n(parts) if len(parts) > 1 else parts[0]

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
        assert task.sweep is not None
        assert task.microbatch is not None
        when = task.chunk, task.sweep, task.part
        function = self.program.functions.get(when)
        if function is None:
            return
        microbatch = task.microbatch
        inputs = [self._value(t, microbatch) for t in function.arguments]
        inputs += [self.remote[v] for v in function.remote_values]
        if function.weighted:
            inputs.append(tf.cast(self.weights[microbatch], tf.float64))
        number = self.program.number
        with tf.name_scope(str(task)):
            begun = begin_task(task, self.step, number, [*self._after(), *self._not_computed(inputs)])
            with tf.control_dependencies([begun]):
                first = self.first_calls.get(when)
                results = function.function(*inputs) if first is None else first.again(inputs)
            call = _call_op(function, results)
            tf_internals.run_independently(call)
            self.last_compute = end_task(task, self.step, number, call)
        if first is None:
            self.first_calls[when] = _Call.of(call)
        self.calls.add(call.name)
        self.all_ops.append(self.last_compute)
        for tensor, result in zip(function.outputs, results, strict=True):
            result.set_shape(self.program.split.graph.type_of(tensor).shape)
            self.values[tensor, microbatch] = result
            if tensor in self.program.summed - self.program.accumulators.keys():
                self._accumulate(tensor, microbatch, result)

    def _not_computed(self, inputs: Sequence[tf.Tensor]) -> list[tf.Operation]:
        """What makes these inputs, other than the tasks, which come after one another, and what is there already."""
        makers = {tensor.op.name: tensor.op for tensor in inputs if tf.is_symbolic_tensor(tensor)}
        return [op for name, op in makers.items() if name not in self.calls]

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


@dataclass(frozen=True)
class _Call:
    """A call of a function that is in the graph, for others like it: to copy one is much quicker than to make it."""

    op: tf.Operation
    attributes: Mapping[str, Any]

    @classmethod
    def of(cls, op: tf.Operation) -> _Call:
        return cls(op, tf_internals.attributes_of_call(op))

    def again(self, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The function's results for other arguments; what it captures stays."""
        captured = list(self.op.inputs)[len(inputs) :]
        dtypes = [tensor.dtype for tensor in self.op.outputs]
        made = add_op(self.op.graph, self.op.type, [*inputs, *captured], dtypes, self.attributes)
        return list(made.outputs)


def _call_op(function: SegmentFunction, results: Any) -> tf.Operation:
    """The op of a function call that was just made: the maker of its results, or the newest op where it has none."""
    if function.outputs:
        return results[0].op
    made = reversed(tf_internals.current_graph().get_operations())
    return next(op for op in made if op.type in CALL_OPS)
