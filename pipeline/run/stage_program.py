"""What one rank runs in a step: its task list, and the functions that the tasks call.

cut step ──▶ step_tasks: the tasks of all stages ──▶ build_stage_program: the functions of one ──▶ executor
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import tensorflow as tf

from smp_tf.partition.graph.op_graph import Tensor
from smp_tf.partition.graph.op_kinds import SUM_OVER_REPLICAS
from smp_tf.partition.split.split import Segment, Split, Visit
from smp_tf.pipeline.programs.check import check
from smp_tf.pipeline.run.early_sums import EarlySums, plan_early_sums
from smp_tf.pipeline.run.microbatch_sums import MicrobatchSums, WantedSums, sums_of, sums_of_functions
from smp_tf.pipeline.run.reduction import Bucket, Reduction, when_of
from smp_tf.pipeline.run.replica_sums import ReplicaEnds, ReplicaSum, sums_in
from smp_tf.pipeline.run.segment_function import SegmentFunction, Summing, build_segment_function
from smp_tf.pipeline.run.step_tasks import StageTasks, add_stage_tasks, edges_of
from smp_tf.pipeline.task import Program, Task


@dataclass(frozen=True)
class Endpoint:
    """Which end of its program's messages a rank is.

    Args:
        number: number of the program, equal on all ranks. It is the first part of every message's tag.
        stage: the stage of this rank.
        ranks: world rank of every stage of this replica.
        replicas: whom sums over the replicas within segments are made with; None where there are none.
    """

    number: int
    stage: int
    ranks: tuple[int, ...]
    replicas: ReplicaEnds | None = None


@dataclass(frozen=True)
class StageProgram:
    """What one rank runs in a step: its task list, and the functions that the tasks call.

    Args:
        split: the cut step.
        planned: the tasks of all stages.
        end: which rank this is.
        variables: TensorFlow variables by index in the op graph.
        functions: this stage's segments as functions, by visit.
        sums: the sums over the microbatches that it makes.
        reduction: how gradients are averaged over the replicas; None where there is one replica.
        last: the last task that makes gradients, where it gives their sums before it ends, and its function; else None.
    """

    split: Split
    planned: Program
    end: Endpoint
    variables: Mapping[int, tf.Variable]
    functions: Mapping[Visit, SegmentFunction]
    sums: MicrobatchSums
    reduction: Reduction | None = None
    last: tuple[Task, SegmentFunction] | None = None

    @property
    def number(self) -> int:
        """Returns the number of the program, equal on all ranks."""
        return self.end.number

    @property
    def stage(self) -> int:
        """The stage of this rank."""
        return self.end.stage

    @property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return self.planned.microbatches

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Returns the tasks of this stage, in order."""
        return self.planned.ranks[self.stage]

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Returns the buckets that this stage averages over the replicas, by the numbers of the REDUCE tasks."""
        return self.reduction.buckets if self.reduction is not None else ()

    @property
    def replica_sums(self) -> tuple[ReplicaSum, ...]:
        """Returns the sums over the replicas that this stage makes for each microbatch."""
        segments = self.split.segments_of(self.stage).values()
        return tuple(each for segment in segments for each in sums_in(self.split.graph, segment))

    def without_definitions(self) -> StageProgram:
        """Returns the program with no more of the op graph than what writing it into a graph asks for."""
        graph = self.split.graph.bare({SUM_OVER_REPLICAS})
        assignment = replace(self.split.assignment, graph=graph)
        return replace(self, split=replace(self.split, graph=graph, assignment=assignment))

    def function_of(self, task: Task) -> SegmentFunction | None:
        """Returns the function that a compute task calls; None where it has nothing to do."""
        if self.last is not None and task == self.last[0]:
            return self.last[1]
        return self.functions.get(when_of(task))


def build_stage_program(
    split: Split,
    program: Program,
    end: Endpoint,
    variables: Mapping[int, tf.Variable],
    *,
    tasks: StageTasks | None = None,
    sums: WantedSums | None = None,
    xla: bool = False,
    samples: int = 1,
) -> StageProgram:
    """Traces the functions of one stage.

    Args:
        split: the cut step.
        program: the tasks of the microbatches, of all stages.
        end: which rank this is.
        variables: the variables whose handles this rank may use, by index in the op graph.
        tasks: what the stages do once a step; None for nothing.
        sums: what is wanted of the sums over the microbatches; None for the sums alone, of microbatches that weigh the
            same.
        xla: compile the functions with XLA, where XLA can.
        samples: samples of a microbatch, where the graph leaves that length open.

    Returns:
        The program of this rank.
    """
    tasks, sums = tasks or StageTasks(), sums or WantedSums()
    made = sums_of(split, end.stage, sums, program.microbatches, f"smp_sum_{end.number}")
    program, buckets = add_stage_tasks(split, program, tasks, sums.kept, samples)
    if tasks != StageTasks():
        check(program, edges_of(split))
    averaging = tasks.averaging
    reduction: Reduction | None = None
    if averaging is not None:
        assert averaging.reduce is not None
        reduction = Reduction(averaging.reduce, averaging.gradients, buckets[end.stage])
    tracing = _Tracing(split, split.segments_of(end.stage), variables, made, end.replicas, xla, samples)
    last: tuple[Task, SegmentFunction] | None = None
    # A function that XLA compiles gives nothing before it ends.
    if reduction is not None and not xla:
        dense = [bucket for bucket in reduction.buckets if not bucket.is_sparse]
        whole = sums_of_functions(split, end.stage, program.microbatches)
        own = program.ranks[end.stage]
        early = plan_early_sums(split, end.stage, own, dense, whole, program=end.number, device=sums.device)
        if early is not None:
            last = early.task, tracing.function_of(when_of(early.task), early)
    only = {when_of(last[0])} if last is not None and program.microbatches == 1 else set()
    functions = {when: tracing.function_of(when) for when in tracing.segments if when not in only}
    return StageProgram(split, program, end, variables, functions, made, reduction, last)


@dataclass(frozen=True)
class _Tracing:
    """What the functions of a stage are traced from.

    Args:
        split: the cut step.
        segments: of the stage, by visit.
        variables: the variables whose handles this rank may use, by index in the op graph.
        sums: the sums over the microbatches that it makes.
        replicas: whom sums over the replicas are made with; None where there are none.
        xla: compile the functions with XLA, where XLA can.
        samples: samples of a microbatch, where the graph leaves that length open.
    """

    split: Split
    segments: Mapping[Visit, Segment]
    variables: Mapping[int, tf.Variable]
    sums: MicrobatchSums
    replicas: ReplicaEnds | None
    xla: bool
    samples: int

    def function_of(self, when: Visit, early: EarlySums | None = None) -> SegmentFunction:
        """Traces a segment.

        Args:
            when: its visit.
            early: the sums that it gives before it ends; None for none.
        """
        segment, sums = self.segments[when], self.sums
        own = {t: sums.accumulators[t] for t in segment.outputs if t in sums.accumulators}
        others = [other for other in self.segments.values() if other is not segment]
        taken = own.keys() | set(early.tensors if early is not None else ())
        return build_segment_function(
            self.split.graph,
            segment,
            self.variables,
            outputs=tuple(
                t for t in segment.outputs if t not in taken or t in sums.kept or _is_read(self.split, others, t)
            ),
            summing=Summing(own, sums.is_weighted, early, sums.tensors, sums.device),
            replicas=self.replicas,
            xla=self.xla,
            samples=self.samples,
        )


def _is_read(split: Split, others: Sequence[Segment], tensor: Tensor) -> bool:
    """Returns whether another segment of the stage, or another stage, needs a tensor of every microbatch."""
    return any(tensor in s.inputs for s in others) or any(t.tensor == tensor and not t.is_sum for t in split.transfers)
