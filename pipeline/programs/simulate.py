"""Simulates a program with given task times: step time, bubble, what runs when, and a drawing.

The times are those of a rank that has a processor for itself. Transfers run during compute tasks and next to each
other. What a rank does with other replicas runs during its compute tasks, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from smp_tf.pipeline.collection import collection_put_off
from smp_tf.pipeline.errors import ProgramError, ScheduleError
from smp_tf.pipeline.programs.chunk_times import ChunkTimes, TaskTimes, Times, times_per_chunk
from smp_tf.pipeline.programs.dependencies import dependencies
from smp_tf.pipeline.programs.kinds import KINDS, Busy, duration
from smp_tf.pipeline.programs.replay import Span, replay
from smp_tf.pipeline.programs.stash import peak_stash
from smp_tf.pipeline.task import Edge, Kind, Program, Task


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A simulated step.

    Attributes:
        program: the program that ran.
        spans: start and end of each rank's tasks, in list order. A transfer starts when its end is opened, and ends
            when the tensor has arrived.
    """

    program: Program
    spans: tuple[tuple[Span, ...], ...]

    @property
    def step_time(self) -> float:
        """Returns when all is done: the last task of the last rank, and what it does with other replicas."""
        return max(span.end for spans in self.spans for span in spans)

    @property
    def computed(self) -> float:
        """Returns when the last rank has computed and received all, without what it still averages and updates."""
        return max(
            (
                span.end
                for spans in self.spans
                for span in spans
                if span.task.kind.is_compute or span.task.kind.is_transfer
            ),
            default=0.0,
        )

    @property
    def busy(self) -> tuple[float, ...]:
        """Returns the time that each rank computes."""
        return tuple(
            sum(span.end - span.start for span in spans if KINDS[span.task.kind].busy is Busy.RANK)
            for spans in self.spans
        )

    @property
    def idle(self) -> tuple[float, ...]:
        """Returns the time that each rank does not compute, until the end of the step."""
        step_time = self.step_time
        return tuple(step_time - busy for busy in self.busy)

    @property
    def bubble_ratio(self) -> float:
        """Returns the share of all ranks' time in which they do not compute."""
        total = self.step_time * self.program.stages
        return sum(self.idle) / total if total else 0.0

    def peak_activations(self, freed_by: Kind = Kind.W) -> tuple[float, ...]:
        """Returns the most microbatches whose activations each rank holds.

        Args:
            freed_by: W, or I for segments that free nearly all of their stash at the first piece.

        Returns:
            One number per rank, in units of the rank's whole share of the model.
        """
        placement = self.program.placement()
        peaks = peak_stash(self.program, freed_by)
        return tuple(peak / placement.count(rank) for rank, peak in enumerate(peaks))

    def span_of(self, task: Task) -> Span:
        """Returns when a task ran.

        Raises:
            KeyError: the program has no such task.
        """
        for spans in self.spans:
            for span in spans:
                if span.task == task:
                    return span
        raise KeyError(task)


@collection_put_off()
def simulate(
    program: Program,
    times: Times = ChunkTimes(),  # noqa: B008 - it never changes
    edges: Sequence[Edge] | None = None,
    *,
    comm: float | Mapping[int, float] = 0.0,
    once: Mapping[Task, float] | None = None,
) -> SimulatedStep:
    """Simulates what would run when.

    Args:
        program: a program with or without transfers.
        times: task times of every chunk, or one for all.
        edges: the edges that its SEND and RECV tasks name; None for a program without transfers, whose chunks are
            assumed to form a chain.
        comm: how long a message takes, in the unit of `times`: one number, or one per edge index.
        once: how long tasks take that run once per step, such as REDUCE, in the unit of `times`; none by default.

    Returns:
        The timeline.

    Raises:
        ProgramError: ranks wait for each other forever. `check` says why.
        ScheduleError: there are not as many times as chunks, or times per edge lack an edge.

    Example:
        >>> from smp_tf.pipeline.schedules.schedule import build
        >>> simulate(build("interleaved", stages=4, microbatches=8)).step_time
        33.0
    """
    known = TaskTimes(times_per_chunk(times, program.chunks), once or {})
    result = replay(program, dependencies(program, edges), duration(known), latency_of(comm, edges))
    if result.stuck:
        raise waits_forever(program, result.stuck[0].rank, result.stuck[0].position)
    return SimulatedStep(program, result.spans)


def latency_of(comm: float | Mapping[int, float], edges: Sequence[Edge] | None) -> Callable[[Task], float]:
    """Returns how long the message of a task takes.

    Args:
        comm: one number, or one per edge index.
        edges: edges of the program; None for one without transfers.

    Raises:
        ScheduleError: times per edge lack an edge.
    """
    if isinstance(comm, int | float):
        return lambda task: comm
    lacking = [edge.index for edge in edges or () if edge.index not in comm]
    if lacking or edges is None:
        raise ScheduleError(
            "Message times per edge name every edge, and need the edges. Received: comm for "
            f"{sorted(comm)}, edges lacking: {lacking if edges else 'no edges given'}"
        )

    def latency(task: Task) -> float:
        # Other messages, such as hashes of a batch, belong to no edge.
        return 0.0 if task.edge is None else comm[task.edge]

    return latency


def waits_forever(program: Program, rank: int, position: int) -> ProgramError:
    """Returns the error for a rank of a program that never gets beyond a position of its list."""
    return ProgramError(
        f"Only a program that can run has a step time. Received: one in which rank {rank} waits forever before "
        f"{program.ranks[rank][position]}; check(program) tells more"
    )


def lower_bound(
    times: Sequence[ChunkTimes],
    microbatches: int,
    *,
    placement: Sequence[int] | None = None,
    split_backward: bool = False,
    cores: int | None = None,
) -> float:
    """Returns a time that no schedule of these tasks beats, even if messages are free.

    A rank cannot start before a microbatch has come up to its first chunk. With backward in one piece, its last result
    has to travel back down. With backward cut in two, the other ranks may still have weight gradients to make
    meanwhile, and rank 0 has at least one to make at the end.

    Args:
        times: task times of every chunk.
        microbatches: how many microbatches a step runs.
        placement: rank of each chunk; None for one chunk per rank.
        split_backward: whether backward is cut into I and W.
        cores: number of processors that all ranks together have; None for enough.

    Returns:
        The bound, in the unit of `times`.

    Example:
        >>> lower_bound([ChunkTimes()] * 4, microbatches=8)
        33.0
    """
    ranks = tuple(range(len(times))) if placement is None else tuple(placement)
    if len(ranks) != len(times):
        raise ScheduleError(
            f"A placement names the rank of every chunk. Received: {len(ranks)} ranks for {len(times)} chunks"
        )
    work = [each.forward + each.backward for each in times]
    bounds = [0.0 if cores is None else microbatches * sum(work) / cores]
    if not split_backward:
        bounds.append(sum(work))
    for rank in set(ranks):
        before = times[: ranks.index(rank)]
        own = [each for each, at in zip(times, ranks, strict=True) if at == rank]
        forward = sum(each.forward for each in own)
        inputs = sum(each.input_gradient for each in own)
        weights = sum(each.weight_gradient for each in own)
        reached = sum(each.forward for each in before)
        busy = microbatches * (forward + inputs + weights)
        if split_backward:
            down = sum(each.input_gradient for each in before)
            last_weights = times[0].weight_gradient
            other = microbatches * (forward + inputs) + down + last_weights
            bounds.append(reached + max(busy, other))
        else:
            bounds.append(reached + sum(each.backward for each in before) + busy)
    return max(bounds)
