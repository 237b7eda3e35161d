"""Counts what a stage holds over a step, besides its weights, by replaying the tasks of all stages.

    stage 0    F0 ──── F1 ──── ┄┄┄┄ B0 ──── B1 ────
    stash      ├ of 0 ──────────────────┤
                        ├ of 1 ─────────────────┤
    sent        ├ of 0 ─┤  ├ of 1 ─┤                 until the other stage has it
    received                      ├ for B0 ─┤           from its arrival to the end of its reader
    working    ▄▄▄▄    ▄▄▄▄         ▄▄▄▄    ▄▄▄▄        of the segment that runs

The fullest moment is what must fit. Its bytes are counted by purpose.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from smp_tf.partition.graph.op_graph import SOURCES, Tensor
from smp_tf.partition.graph.op_kinds import NO_MEMORY_OPS
from smp_tf.partition.split.memory_roots import roots_of_segments
from smp_tf.partition.split.split import Split, Visit
from smp_tf.partition.split.working_set import segment_memory
from smp_tf.partition.units.cost import node_seconds
from smp_tf.pipeline.programs.chunk_times import ChunkTimes
from smp_tf.pipeline.programs.kinds import KINDS, Holds
from smp_tf.pipeline.programs.replay import Span
from smp_tf.pipeline.programs.simulate import SimulatedStep, simulate
from smp_tf.pipeline.task import Edge, Program, Task


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes that a stage holds at a moment of forward and backward, such as the fullest.

    Args:
        stash: what forward keeps for backward, for all microbatches under way.
        transport: what was received but not yet read, and what is not yet sent.
        working: what lives within the running task, and results that are kept to the end.
        constants: what is computed once and stays. It is not among `total`.
    """

    stash: int
    transport: int
    working: int
    constants: int = 0

    @property
    def total(self) -> int:
        """Returns all bytes that come and go."""
        return self.stash + self.transport + self.working


def step_memory(
    split: Split,
    program: Program,
    edges: Sequence[Edge],
    times: Sequence[Sequence[ChunkTimes]],
    samples: int = 1,
    least: int | None = None,
    beyond: Mapping[str, int] | None = None,
) -> tuple[tuple[StepMemory, ...], tuple[StepMemory, ...]]:
    """Returns what the stages of a cut step hold at their fullest: of all tensors, and of large ones alone.

    Args:
        split: the cut step.
        program: the tasks of all stages, with transfers.
        edges: the transfers, as the program names them.
        times: how long the tasks of each chunk take, in any one unit. Where this is unknown, there are several
            candidates. For every stage, those count with which it holds the most.
        samples: samples of a microbatch, where the graph does not say their number.
        least: bytes from which on a tensor is large. With None nothing is told of large ones.
        beyond: how many more bytes are taken while a node runs than is estimated, by the node's name.

    Returns:
        One entry for each stage, without weights, slots, the stage's own sums of gradients and the batch; and the same
        of large tensors, () where they are not asked for.
    """
    stages = _stages(split, program.stages, samples, least or 0, beyond)
    sizes = (False,) if least is None else (False, True)
    held: dict[bool, list[list[StepMemory]]] = {False: [], True: []}
    for each in times:
        spans = simulate(program, each, edges).spans
        read = _first_reads(split, spans)
        lives = [list(stage.lives(own, read)) for stage, own in zip(stages, spans, strict=True)]
        for large in sizes:
            timed = zip(stages, spans, lives, strict=True)
            held[large].append([stage.fullest(own, lived, large=large) for stage, own, lived in timed])
    return _most_of_each(held[False]), _most_of_each(held[True])


def _most_of_each(found: Sequence[Sequence[StepMemory]]) -> tuple[StepMemory, ...]:
    """Returns what each stage holds with the times with which it holds the most."""
    return tuple(max(each, key=lambda memory: memory.total) for each in zip(*found, strict=True))


def memory_over_step(
    split: Split, timeline: SimulatedStep, samples: int = 1, beyond: Mapping[str, int] | None = None
) -> tuple[tuple[tuple[float, StepMemory], ...], ...]:
    """Returns what the stages of a cut step hold from moment to moment.

    Args:
        split: the cut step.
        timeline: what runs when, with transfers.
        samples: samples of a microbatch, where the graph does not say their number.
        beyond: how many more bytes are taken while a node runs than is estimated, by the node's name.

    Returns:
        For each stage, when a task begins or ends, and what is held from then on. Within a task, all counts that exists
        at any time of it. Weights, slots, the stage's own sums of gradients and the batch are not counted.
    """
    read = _first_reads(split, timeline.spans)
    stages = _stages(split, len(timeline.spans), samples, beyond=beyond)
    return tuple(
        stage.moments(own, list(stage.lives(own, read))) for stage, own in zip(stages, timeline.spans, strict=True)
    )


def _stages(
    split: Split, count: int, samples: int, least: int = 0, beyond: Mapping[str, int] | None = None
) -> list[_Stage]:
    seconds = node_seconds(split.graph, unknown=samples)
    more = {n: beyond[node.name] for n, node in enumerate(split.graph.nodes) if node.name in beyond} if beyond else {}
    return [_Stage(split, stage, seconds, samples, least, more) for stage in range(count)]


#: When each sent tensor is first read, by transfer and microbatch.
_Reads = Mapping[tuple[int, int], float]


def _first_reads(split: Split, spans: Sequence[Sequence[Span]]) -> _Reads:
    """Returns when the first reader of each transfer's tensor begins, by transfer and microbatch; none for results."""
    begins: dict[tuple[int, int | None, int | None], float] = {}
    for own in spans:
        for span in own:
            begins.setdefault((span.task.chunk, span.task.sweep, span.task.microbatch), span.start)
    microbatches = {s.task.microbatch for own in spans for s in own if s.task.microbatch is not None}
    return {
        (t.index, m): begins[t.dst_chunk, t.dst_sweep, m]
        for t in split.transfers
        if t.dst_sweep is not None and not t.once_per_step
        for m in microbatches
        if (t.dst_chunk, t.dst_sweep, m) in begins
    }


class _Use(enum.Enum):
    """The purpose of a tensor that lives longer than a task."""

    STASH = 0
    TRANSPORT = 1
    RESULT = 2


@dataclass(slots=True)
class _Life:
    """When a tensor of a microbatch comes and goes, and when a segment first reads it."""

    begin: float
    end: float
    use: _Use
    received: bool = False
    read: float = math.inf


#: A tensor of a microbatch.
_Lived = tuple[Tensor, _Life]


def _moments(changes: Mapping[_Use, Sequence[int]], working: Sequence[int], constants: int) -> Iterator[StepMemory]:
    """Yields what exists at one moment after the other, given what comes and goes before each."""
    held = {use: list(accumulate(change)) for use, change in changes.items()}
    for at, own in enumerate(working):
        yield StepMemory(held[_Use.STASH][at], held[_Use.TRANSPORT][at], held[_Use.RESULT][at] + own, constants)


def _key(task: Task) -> Visit:
    """Returns the visit of a microbatch that a task is."""
    return Visit(task.chunk, task.sweep or 0, task.part)


class _Stage:
    """One stage of the step, replayed by the times of its tasks and of the first reads of what is sent.

    Args:
        split: the cut step.
        stage: which stage.
        seconds: how long each node of the step takes.
        samples: length assumed for dimensions that are not known.
        least: bytes from which on a tensor is large.
        beyond: how many more bytes are taken while a node runs than is estimated, by node.
    """

    def __init__(
        self,
        split: Split,
        stage: int,
        seconds: Sequence[float],
        samples: int,
        least: int,
        beyond: Mapping[int, int],
    ) -> None:
        self._graph = split.graph
        self._samples, self._least = samples, least
        self._segments = split.segments_of(stage)
        self._transfers = {t.index: t for t in split.transfers if not t.once_per_step}
        self._sums = {t.index: t.tensor for t in split.transfers if t.is_sum and t.tensor is not None}
        self._root = roots_of_segments(split.graph, self._segments.values())
        self._stash = {self._memory_of(t) for t in split.stash(stage)}
        self._results = {self._memory_of(o.tensor) for o in split.outputs if not o.is_summed}
        summed = [t for o in split.outputs if o.is_summed for t in o.summands or (o.tensor,)]
        self._summed = frozenset(summed)
        found = {
            when: segment_memory(split.graph, segment, seconds, summed, samples, least, beyond)
            for when, segment in self._segments.items()
        }
        self._working = {when: memory.working for when, memory in found.items()}
        self._constants = [memory.constants for memory in found.values()]

    def fullest(self, spans: Sequence[Span], lives: Sequence[_Lived], *, large: bool = False) -> StepMemory:
        """Returns what exists in the task in which most exists.

        Args:
            spans: the tasks of the stage.
            lives: the tensors that come from elsewhere or outlive the task that makes them.
            large: whether large tensors count alone.
        """
        moments = [held for _, held in self.moments(spans, lives, large=large)]
        if not moments:
            return StepMemory(0, 0, 0)
        most = max(moments, key=lambda moment: moment.total)
        # The stash of all microbatches under way is counted as such, even where it is not complete at that moment.
        stash = max(moment.stash for moment in moments)
        return StepMemory(stash, most.transport, max(0, most.total - stash - most.transport), most.constants)

    def moments(
        self, all_spans: Sequence[Span], lives: Sequence[_Lived], *, large: bool = False
    ) -> tuple[tuple[float, StepMemory], ...]:
        """Returns when tasks begin or end, and what exists from then on."""
        least = self._least if large else 0
        runs = [s for s in all_spans if KINDS[s.task.kind].holds is Holds.SEGMENT]
        spans = [s for s in runs if _key(s.task) in self._working]
        begins, ends = [span.start for span in spans], [span.end for span in spans]
        within = {use: [0] * (len(spans) + 1) for use in _Use}
        behind = {use: [0] * (len(spans) + 1) for use in _Use}
        for tensor, life in lives:
            nbytes = self._graph.type_of(tensor).nbytes(self._samples, least)
            # A tensor counts in every task that ends after it came and begins before it went, and between tasks.
            for changes, first, last in (
                (within, bisect_right(ends, life.begin), bisect_left(begins, life.end)),
                (behind, bisect_left(ends, life.begin), bisect_left(ends, life.end)),
            ):
                if first < last:
                    changes[life.use][first] += nbytes
                    changes[life.use][last] -= nbytes
        working = [self._working[_key(span.task)][large] for span in spans]
        constants = sum(each.large if large else each.bytes for each in self._constants)
        inside = zip(begins, _moments(within, working, constants), strict=True)
        between = zip(ends, _moments(behind, [0] * len(spans), constants), strict=True)
        return tuple(moment for pair in zip(inside, between, strict=True) for moment in pair)

    def lives(self, spans: Sequence[Span], read: _Reads) -> Iterator[_Lived]:
        """Yields the tensors that come from elsewhere or outlive the task that makes them."""
        lives: dict[tuple[Tensor, int], _Life] = {}
        for span in spans:
            task = span.task
            holds = KINDS[task.kind].holds
            if holds is Holds.RECEIVED and task.edge in self._transfers:
                self._begins(lives, self._transfers[task.edge].tensor, task.microbatch, span.end, _Use.TRANSPORT)
            elif holds is Holds.RECEIVED and task.edge in self._sums:
                # What another stage adds to a gradient is in memory next to this stage's own sum until both are
                # complete.
                yield self._sums[task.edge], _Life(span.end, math.inf, _Use.TRANSPORT)
            elif holds is Holds.SENT and task.edge in self._transfers:
                # A message may need all the time that it has.
                assert task.microbatch is not None
                until = max(span.end, read.get((task.edge, task.microbatch), span.end))
                self._is_there(lives, self._transfers[task.edge].tensor, task.microbatch, until, _Use.TRANSPORT)
            elif holds is Holds.SEGMENT and (segment := self._segments.get(_key(task))):
                for tensor in segment.inputs:
                    self._is_there(lives, tensor, task.microbatch, span.end, read=span.start)
                for tensor in segment.outputs:
                    if tensor not in self._summed:
                        self._begins(lives, tensor, task.microbatch, span.end, _Use.RESULT)
        for (tensor, _), life in lives.items():
            if tensor in self._results:
                life.end = math.inf
            if tensor in self._stash:
                # What is received counts as stash from its first reader on.
                if life.received and life.read > life.begin:
                    yield tensor, _Life(life.begin, life.read, _Use.TRANSPORT)
                    life.begin = life.read
                life.use = _Use.STASH
            yield tensor, life

    def _begins(
        self,
        lives: dict[tuple[Tensor, int], _Life],
        tensor: Tensor | None,
        microbatch: int | None,
        at: float,
        use: _Use,
    ) -> None:
        if tensor is None or microbatch is None:
            return
        memory = self._memory_of(tensor)
        node = self._graph.nodes[memory.node]
        if node.op not in SOURCES and node.op not in NO_MEMORY_OPS:
            lives.setdefault((memory, microbatch), _Life(at, at, use, use is _Use.TRANSPORT))

    def _is_there(
        self,
        lives: dict[tuple[Tensor, int], _Life],
        tensor: Tensor | None,
        microbatch: int | None,
        until: float,
        use: _Use | None = None,
        read: float = math.inf,
    ) -> None:
        life = None if tensor is None or microbatch is None else lives.get((self._memory_of(tensor), microbatch))
        if life is not None:
            life.end = max(life.end, until)
            life.use = use or life.use
            life.read = min(life.read, read)

    def _memory_of(self, tensor: Tensor) -> Tensor:
        return self._root.get(tensor, tensor)
