"""Puts the updates of weights into a program: last in a rank's list, when its tasks are done and its gradients there.

0F0 0F1 0B0 0B1 0REDUCE0 0REDUCE1 0SUM 0APPLY0 0APPLY1        an APPLY for each REDUCE, or one for all
1F0 1B0 1F1 1B1 1REDUCE0 1TELL 1SUM 1APPLY0                   sums over the stages, such as a norm, before them

The optimizer does it. `fit` lets the list call it, and then the ops of these tasks are part of the step's graph. A
script's own loop calls it after the step: these tasks are in the list all the same, priced and drawn, and the list says
that the script writes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from smp_tf.pipeline.programs.kinds import APPLY
from smp_tf.pipeline.programs.stage_sums import sums_on
from smp_tf.pipeline.task import Program, Task


def add_updates(
    program: Program, buckets: Mapping[int, Sequence[int | None]], *, stage_sums: int = 0, by_script: bool = False
) -> Program:
    """Returns the program with the updates of all weights.

    Args:
        program: with its REDUCE tasks, and without any APPLY.
        buckets: the numbers of what each stage updates together, by stage; None for what has no number. A stage that
            trains nothing is not among them.
        stage_sums: how often the stages put numbers together before.
        by_script: whether the script calls the optimizer, after the step.
    """
    ranks = []
    for rank, tasks in enumerate(program.ranks):
        sums = sums_on(rank, stage_sums if program.stages > 1 else 0)
        applies = (Task(APPLY, rank, bucket=number) for number in buckets.get(rank, ()))
        ranks.append((*tasks, *sums, *applies))
    return dataclasses.replace(program, ranks=tuple(ranks), by_script=by_script)
