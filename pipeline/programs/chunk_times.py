"""How long tasks take: those of a chunk for every microbatch, and those that run once per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from smp_tf.pipeline.errors import ScheduleError
from smp_tf.pipeline.task import Task


@dataclass(frozen=True, slots=True)
class ChunkTimes:
    """How long the tasks of a chunk take for one microbatch, in any one unit of time.

    Attributes:
        forward: F.
        input_gradient: I, the part of backward that the chunk before waits for.
        weight_gradient: W, the rest of backward. B takes the time of both. Where backward is not cut, only the sum
            matters.
        extra: T of each further sweep, by sweep number; 0 where it is not given.
    """

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    extra: Mapping[int, float] = field(default_factory=dict)

    @property
    def backward(self) -> float:
        """Returns how long B takes."""
        return self.input_gradient + self.weight_gradient


Times = ChunkTimes | Sequence[ChunkTimes]


@dataclass(frozen=True, slots=True)
class TaskTimes:
    """How long all tasks of a program take, in any one unit of time.

    Attributes:
        chunks: the times of every chunk.
        once: the times of tasks that run once per step, such as REDUCE; 0 where one is not given.
    """

    chunks: Sequence[ChunkTimes]
    once: Mapping[Task, float] = field(default_factory=dict)

    def of_chunk(self, task: Task) -> ChunkTimes:
        """Returns the times of the chunk of a task."""
        return self.chunks[task.chunk]


def times_per_chunk(times: Times, chunks: int) -> Sequence[ChunkTimes]:
    """Returns the times of every chunk.

    Args:
        times: of every chunk, or one for all.
        chunks: how many there are.

    Raises:
        ScheduleError: there are not as many times as chunks.
    """
    if isinstance(times, ChunkTimes):
        return [times] * chunks
    if len(times) != chunks:
        raise ScheduleError(f"Times are given for each of the {chunks} chunks, or once for all. Received: {len(times)}")
    return times
