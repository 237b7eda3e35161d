"""Puts into a program what a loop computes of a batch over the replicas: joined samples, and averages of what it logs.

0F0 0F1 0B0 0B1 0REDUCE0 0JOIN 0APPLY0 0LOG
"""

from __future__ import annotations

import dataclasses

from smp_tf.pipeline.programs.kinds import JOIN, LOG
from smp_tf.pipeline.task import Program, Task


def add_joins(program: Program) -> Program:
    """Returns the program with a JOIN on every rank, last in its list.

    Args:
        program: the tasks of all ranks, without any that comes after it.
    """
    ranks = tuple((*tasks, Task(JOIN, rank)) for rank, tasks in enumerate(program.ranks))
    return dataclasses.replace(program, ranks=ranks)


def add_logs(program: Program) -> Program:
    """Returns the program with a LOG on every rank, last in its list.

    Args:
        program: the tasks of all ranks, without any LOG.
    """
    ranks = tuple((*tasks, Task(LOG, rank)) for rank, tasks in enumerate(program.ranks))
    return dataclasses.replace(program, ranks=ranks)
