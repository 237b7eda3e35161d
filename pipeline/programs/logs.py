"""Puts the average over replicas of what a loop logs of a batch into a program, last in every rank's list.

0F0 0F1 0B0 0B1 0REDUCE0 0APPLY0 0LOG
"""

from __future__ import annotations

import dataclasses

from smp_tf.pipeline.programs.kinds import LOG
from smp_tf.pipeline.task import Program, Task


def add_logs(program: Program) -> Program:
    """Returns the program with a LOG on every rank, last in its list.

    Args:
        program: the tasks of all ranks, without any LOG.
    """
    ranks = tuple((*tasks, Task(LOG, rank)) for rank, tasks in enumerate(program.ranks))
    return dataclasses.replace(program, ranks=ranks)
