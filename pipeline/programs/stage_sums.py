"""The tasks that add up a few numbers of every stage. They are a small step of its own, without microbatches.

0SUM           combines what all others have told, and sends them what comes of it
1TELL 1SUM     sends its own numbers, and receives what comes of all
2TELL 2SUM
"""

from __future__ import annotations

from smp_tf.pipeline.programs.kinds import SUM, TELL
from smp_tf.pipeline.task import Program, Task


def stage_sum(stages: int) -> Program:
    """Returns the program of a sum over stages, which every rank of a replica runs.

    Args:
        stages: number of stages.
    """
    others = ((Task(TELL, stage), Task(SUM, stage)) for stage in range(1, stages))
    return Program(((Task(SUM, 0),), *others), microbatches=0, chunks=0, sweeps=0)
