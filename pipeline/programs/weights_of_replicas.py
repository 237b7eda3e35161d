"""Puts into a program the sum over the replicas of how much their gradients count. It needs nothing and comes first.

0WEIGH 0F0 0F1 0B0 0B1 0REDUCE0        a rank goes on with its list meanwhile
1WEIGH 1F0 1B0 1F1 1B1 1REDUCE0
"""

from __future__ import annotations

import dataclasses

from smp_tf.pipeline.programs.kinds import WEIGH
from smp_tf.pipeline.task import Program, Task


def add_weights_of_replicas(program: Program) -> Program:
    """Returns the program with a WEIGH at the begin of every rank's list.

    Args:
        program: a program without any WEIGH.
    """
    ranks = tuple((Task(WEIGH, rank), *tasks) for rank, tasks in enumerate(program.ranks))
    return dataclasses.replace(program, ranks=ranks)
