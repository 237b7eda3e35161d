"""The tasks that add up a few numbers of every stage. They are a small step of its own, without microbatches.

0SUM           combines what all others have told, and sends them what comes of it
1TELL 1SUM     sends its own numbers, and receives what comes of all
2TELL 2SUM
"""

from __future__ import annotations

from collections.abc import Iterator

from smp_tf.pipeline.programs.kinds import SUM, TELL
from smp_tf.pipeline.task import Program, Task


def stage_sum(stages: int) -> Program:
    """Returns the program of a sum over stages, which every rank of a replica runs.

    Args:
        stages: number of stages.
    """
    ranks = tuple(tuple(sums_on(stage, 1)) for stage in range(stages))
    return Program(ranks, microbatches=0, chunks=0, sweeps=0)


def sums_on(stage: int, count: int) -> Iterator[Task]:
    """Yields the tasks of a stage by which all stages put numbers together.

    Args:
        stage: which stage.
        count: how often they do.
    """
    for number in range(count):
        # The first one goes without a number.
        bucket = number or None
        if stage > 0:
            yield Task(TELL, stage, bucket=bucket)
        yield Task(SUM, stage, bucket=bucket)
