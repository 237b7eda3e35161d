"""Puts the check of the batch into a program. Every rank compares its arguments with those of the first rank.

0F0 ... 0CHECK        compares with what each of the others has sent
1F0 ... 1CHECK        sends hashes of its batch to rank 0
"""

from __future__ import annotations

import dataclasses

from smp_tf.pipeline.programs.kinds import CHECK
from smp_tf.pipeline.task import Program, Task


def add_input_checks(program: Program) -> Program:
    """Returns the program with a CHECK at the end of every rank's list. Nothing waits for it.

    Args:
        program: a program without any CHECK. One of a single rank, which cannot differ from others, stays as it is.
    """
    if program.stages == 1:
        return program
    ranks = tuple((*tasks, Task(CHECK, rank)) for rank, tasks in enumerate(program.ranks))
    return dataclasses.replace(program, ranks=ranks)
