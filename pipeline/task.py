"""The vocabulary of the pipeline: a task, a program of tasks, an edge between tasks.

A step runs every microbatch through the chunks of a model in *sweeps*, up and down in turn:

    chunk 0      chunk 1      chunk 2
    ------- F -------->                   sweep 0, up:    forward
    <---- B, or I and W ---               sweep 1, down:  backward
    ------- T -------->                   sweep 2, up:    what needs gradients of all chunks,
    <------ T ---------                   sweep 3, down:  for instance their norm, and so on

A chunk is one piece of the model, counted over the whole pipeline; where every rank holds one
chunk, chunk and stage are the same number. A program is one list of tasks per rank. The same
lists drive the executor, the checker, the simulator, the memory forecast, the drawing and the
tests, so they are plain data with a text form, one rank per line:

    0F0 0S0.0 0R1.0 0F1 0S0.1 0R1.1 0B0 0B1
    1R0.0 1F0 1R0.1 1B0 1S1.0 1F1 1B1 1S1.1
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from smp_tf.pipeline.errors import ProgramError


class Index(enum.Enum):
    """What distinguishes tasks of one kind, besides the chunk: the numbers after the kind's word."""

    MICROBATCH = enum.auto()
    SWEEP_AND_MICROBATCH = enum.auto()
    EDGE_AND_MICROBATCH = enum.auto()
    BUCKET = enum.auto()


@dataclass(frozen=True, eq=False)
class Kind:
    """What a task does.

    F: forward. B: backward in one piece. I and W: backward in two pieces; I makes the gradient for the chunk before, W
    the gradients of the weights. T: the work of a sweep after backward. SEND and RECV: one tensor of one transfer edge.
    Activations that are made again are made within B or I.

    Schedules and transfers are made of these. What is done once a step, such as an average over replicas, has a kind of
    its own; it stands next to its row in `programs/kinds.py`. Kinds are equal only where they are the same.

    Attributes:
        word: stands for it in text.
        index: what distinguishes tasks of this kind.
        sweep: the sweep of all tasks of this kind; None where they have none, or several.
        part: 1 for the second part of a backward that is cut in two; else 0.
        name: stands for it in messages; the word where it is not given.
    """

    word: str
    index: Index
    sweep: int | None = None
    part: int = 0
    name: str = ""

    F: ClassVar[Kind]
    B: ClassVar[Kind]
    I: ClassVar[Kind]  # noqa: E741 - the name the literature uses
    W: ClassVar[Kind]
    T: ClassVar[Kind]
    SEND: ClassVar[Kind]
    RECV: ClassVar[Kind]

    #: Found once, as every task is looked up many times.
    is_compute: bool = field(init=False, repr=False)
    is_transfer: bool = field(init=False, repr=False)
    number: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        found = {
            "name": self.name or self.word,
            "is_compute": self.sweep is not None or self.index is Index.SWEEP_AND_MICROBATCH,
            "is_transfer": self.index is Index.EDGE_AND_MICROBATCH,
            "number": int.from_bytes(self.word.encode(), "big"),
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)

    @property
    def is_of_stage(self) -> bool:
        """Returns whether a task of this kind is done for all chunks of a rank, and names a stage, not a chunk."""
        return self.index is Index.BUCKET

    @property
    def needs_microbatch(self) -> bool:
        """Returns whether a task of this kind is always of one microbatch."""
        return self.index in (Index.MICROBATCH, Index.SWEEP_AND_MICROBATCH)


Kind.F = Kind("F", Index.MICROBATCH, 0)
Kind.B = Kind("B", Index.MICROBATCH, 1)
Kind.I = Kind("I", Index.MICROBATCH, 1)
Kind.W = Kind("W", Index.MICROBATCH, 1, part=1)
Kind.T = Kind("T", Index.SWEEP_AND_MICROBATCH)
Kind.SEND = Kind("S", Index.EDGE_AND_MICROBATCH, name="SEND")
Kind.RECV = Kind("R", Index.EDGE_AND_MICROBATCH, name="RECV")


def goes_down(sweep: int) -> bool:
    """Returns whether a sweep runs from the last chunk to the first, as backward does."""
    return sweep % 2 == 1


@dataclass(frozen=True, slots=True)
class Task:
    """One thing that one rank does once per step.

    Attributes:
        kind: what is done.
        chunk: the chunk that it is done for. For SEND it is the chunk that made the tensor, for RECV the chunk that
            needs it. For what is done for all of a rank, such as an average, it is the stage.
        microbatch: which microbatch, from 0; None for what happens once per step.
        edge: index of the transfer edge; SEND and RECV only.
        sweep: 0 for F, 1 for B, I and W (both filled in), 2 or more for T (must be given).
        bucket: the bucket of weights, or None for all of them; only of what is done for all of a rank.

    Example:
        >>> Task(Kind.F, chunk=2, microbatch=0)
        Task('2F0')
        >>> str(Task(Kind.SEND, chunk=1, microbatch=2, edge=3))
        '1S3.2'
    """

    kind: Kind
    chunk: int
    microbatch: int | None = None
    edge: int | None = None
    sweep: int | None = None
    bucket: int | None = None
    #: The hash is computed once, since tasks are looked up many times. It is made of numbers alone, so that it is the
    #: same in every process.
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        kind = self.kind
        expected_sweep = kind.sweep
        if self.sweep is None and expected_sweep is not None:
            object.__setattr__(self, "sweep", expected_sweep)
        if kind.index is Index.SWEEP_AND_MICROBATCH:
            if self.sweep is None or self.sweep < 2:
                raise ProgramError(
                    f"A {kind.name} task belongs to a sweep after backward, 2 or more. Received: {self.sweep}"
                )
        elif self.sweep != expected_sweep:
            raise ProgramError(f"A task of kind {kind.name} has sweep {expected_sweep}. Received: {self.sweep}")
        if kind.is_transfer != (self.edge is not None):
            raise ProgramError(
                "SEND and RECV tasks, and only they, name a transfer edge. "
                f"Received: kind={kind.name}, edge={self.edge}"
            )
        if self.microbatch is None and kind.needs_microbatch:
            raise ProgramError(f"A task of kind {kind.name} needs a microbatch. Received: None")
        known = (self.chunk, self.microbatch or 0, self.edge or 0, self.sweep or 0, self.bucket or 0)
        object.__setattr__(self, "_hash", hash((kind.number, *known)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def part(self) -> int:
        """Returns 1 for W, the second part of a backward that is cut in two; else 0."""
        return self.kind.part

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind.word}{self._index()}"

    def __repr__(self) -> str:
        return f"Task({str(self)!r})"

    def _index(self) -> str:
        match self.kind.index:
            case Index.EDGE_AND_MICROBATCH:
                return _dotted(self.edge, self.microbatch)
            case Index.SWEEP_AND_MICROBATCH:
                return _dotted(self.sweep, self.microbatch)
            case Index.MICROBATCH:
                return str(self.microbatch)
            case Index.BUCKET:
                return "" if self.bucket is None else str(self.bucket)


def _dotted(first: int | None, second: int | None) -> str:
    return f"{first}" if second is None else f"{first}.{second}"


@dataclass(frozen=True, slots=True)
class BucketMakers:
    """What makes the gradients of a bucket. A REDUCE averages them over the replicas.

    Attributes:
        stage: the stage that has the gradients.
        number: the bucket's number, by which its REDUCE names it.
        segments: chunk, sweep and part of the compute tasks that add to the gradients.
        edges: the edges over which other stages send their contributions, in all or for every microbatch.
        nbytes: bytes of all its gradients.
        share: the share of the last of these tasks after which all gradients are there; 1 where that is its end.
    """

    stage: int
    number: int
    segments: frozenset[tuple[int, int, int]]
    edges: frozenset[int] = frozenset()
    nbytes: int = 0
    share: float = 1.0

    def is_made_by(self, task: Task) -> bool:
        """Returns whether a task of the stage adds to the bucket."""
        if task.kind.is_transfer:
            return task.kind is Kind.RECV and task.edge in self.edges
        return task.sweep is not None and (task.chunk, task.sweep, task.part) in self.segments


@dataclass(frozen=True, slots=True)
class Program:
    """One ordered list of tasks per rank of a pipeline.

    Attributes:
        ranks: the tasks of rank 0, of rank 1, and so on.
        microbatches: how many microbatches one step runs.
        chunks: how many chunks the model is cut into.
        sweeps: how often a microbatch crosses the chunks: 1 without backward, 2 with it, more with T tasks.
        buckets: what makes the gradients that its REDUCE tasks average. A bucket that is not here needs all tasks of
            its stage.
        by_script: whether the script writes the updates of weights, after the step. Otherwise the step does.
    """

    ranks: tuple[tuple[Task, ...], ...]
    microbatches: int
    chunks: int
    sweeps: int
    buckets: tuple[BucketMakers, ...] = ()
    by_script: bool = False

    @property
    def stages(self) -> int:
        """Returns how many ranks share the model. Each holds one stage of one or more chunks."""
        return len(self.ranks)

    def __iter__(self) -> Iterator[tuple[Task, ...]]:
        return iter(self.ranks)

    def compute(self, rank: int) -> tuple[Task, ...]:
        """Returns the compute tasks of one rank, in order."""
        return tuple(task for task in self.ranks[rank] if task.kind.is_compute)

    def placement(self) -> tuple[int, ...]:
        """Returns the rank that runs each chunk.

        Returns:
            One rank per chunk, `chunks` of them.

        Raises:
            ProgramError: a chunk is run by no rank, or by two.
        """
        rank_of: dict[int, int] = {}
        for rank, tasks in enumerate(self.ranks):
            for task in tasks:
                if task.kind.is_compute and rank_of.setdefault(task.chunk, rank) != rank:
                    error = ProgramError(
                        f"A chunk is run by one rank. Received: chunk {task.chunk} on rank "
                        f"{rank_of[task.chunk]} and, by task {task}, on rank {rank}"
                    )
                    error.ranks = (rank,)
                    raise error
        missing = [chunk for chunk in range(self.chunks) if chunk not in rank_of]
        if missing:
            raise ProgramError(
                f"Each of the {self.chunks} chunks is run by a rank. Received: a program without "
                f"any task for chunk {missing[0]}"
            )
        return tuple(rank_of[chunk] for chunk in range(self.chunks))

    def place_in_step(self, sweep: int, chunk: int) -> tuple[int, int]:
        """Returns a key by which visits of a microbatch sort in the order in which they happen."""
        return sweep, (self.chunks - 1 - chunk if goes_down(sweep) else chunk)

    def text(self) -> str:
        """Returns the program as text, one rank per line; `programs/text.py` reads it back."""
        return "\n".join(" ".join(map(str, tasks)) for tasks in self.ranks)


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor that one chunk makes and another needs.

    Attributes:
        index: the number by which SEND and RECV tasks name it.
        src_chunk: the chunk that makes it.
        src_sweep: the sweep in which it is made; None for what exists when the step starts, such as the value of a
            weight (`per="step"` only).
        dst_chunk: the chunk that needs it.
        dst_sweep: the sweep of its first reader in that chunk; None for a result of the step, which no task of the
            pipeline reads.
        per: "microbatch"; or "step" for what is sent once. That is the value of a shared weight before its first
            reader, or its accumulated gradient after the last microbatch.
    """

    index: int
    src_chunk: int
    src_sweep: int | None
    dst_chunk: int
    dst_sweep: int | None
    per: Literal["microbatch", "step"] = "microbatch"

    @property
    def crosses(self) -> int:
        """Returns how many chunks further the tensor goes: 1 between neighbours."""
        return abs(self.dst_chunk - self.src_chunk)

    def __str__(self) -> str:
        source = "start" if self.src_sweep is None else f"sweep {self.src_sweep}"
        target = "result" if self.dst_sweep is None else f"sweep {self.dst_sweep}"
        return f"edge {self.index} (chunk {self.src_chunk} {source} -> chunk {self.dst_chunk} {target}, per {self.per})"
