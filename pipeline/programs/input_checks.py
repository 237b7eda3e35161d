"""Puts the check of the batch into a program: every rank holds what it was given against what the first rank was given.

0F0 ... 0CHECK        compares with what each of the others has sent
1F0 ... 1CHECK        sends hashes of its batch to rank 0
"""

from __future__ import annotations

import dataclasses

from smp_tf.pipeline.programs.kinds import CHECK
from smp_tf.pipeline.task import Program, Task


def add_input_checks(program: Program) -> Program:
    """Returns the program with a CHECK on every rank, last in its list, which nothing waits for.

    Args:
        program: without any CHECK. One of a single rank, which has nobody to differ from, stays as it is.
    """
    if program.stages == 1:
        return program
    ranks = tuple((*tasks, Task(CHECK, rank)) for rank, tasks in enumerate(program.ranks))
    return dataclasses.replace(program, ranks=ranks)
