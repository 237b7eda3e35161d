"""Puts the averages of gradients over replicas into a program, as one REDUCE per bucket.

Each comes after the last task that adds to its bucket:

0F0 0F1 0B0 0B1 0REDUCE0 0REDUCE1        a rank goes on with its list; its line to the replicas takes
1F0 1B0 1F1 1B1 1REDUCE0 1S1.1           one bucket after the other
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence

from smp_tf.pipeline.errors import ProgramError
from smp_tf.pipeline.programs.kinds import KINDS, REDUCE, Busy
from smp_tf.pipeline.task import BucketMakers, Program, Task


def add_reductions(program: Program, buckets: Sequence[BucketMakers]) -> Program:
    """Returns the program with a REDUCE for every bucket.

    Args:
        program: a program with its transfers, and without any REDUCE.
        buckets: what is averaged together on every stage, and what makes it, in order for each stage.

    Raises:
        ProgramError: a bucket names a stage that does not exist, or no task of its stage makes anything of it.
    """
    after: dict[tuple[int, int], list[Task]] = defaultdict(list)
    for bucket in buckets:
        if not 0 <= bucket.stage < program.stages:
            raise ProgramError(f"A bucket is of one of the {program.stages} stages. Received: {bucket}")
        tasks = program.ranks[bucket.stage]
        made_at = [position for position, task in enumerate(tasks) if bucket.is_made_by(task)]
        if not made_at:
            raise ProgramError(f"What is averaged is made by a task of its stage. Received: {bucket}")
        after[bucket.stage, made_at[-1]].append(Task(REDUCE, bucket.stage, bucket=bucket.number))
    ranks = tuple(
        tuple(each for position, task in enumerate(tasks) for each in (task, *after[rank, position]))
        for rank, tasks in enumerate(program.ranks)
    )
    return dataclasses.replace(program, ranks=ranks, buckets=tuple(buckets))


def check_replicas(programs: Sequence[Program]) -> None:
    """Raises an error that says who waits for whom, unless replicas do their common tasks in one order.

    A rank's line to the other replicas takes one such task after the other. A task ends when the ranks of all replicas
    that hold the stage have begun it. Each replica has its own number of microbatches.

    Args:
        programs: the program of every replica, each checked by itself.

    Raises:
        ProgramError: the replicas have different numbers of stages, or ranks wait for each other forever.
    """
    stages = {program.stages for program in programs}
    if len(stages) > 1:
        raise ProgramError(f"All replicas have the same stages. Received: {sorted(stages)} stages")
    for stage in range(programs[0].stages):
        lines = [[task for task in program.ranks[stage] if KINDS[task.kind].busy is Busy.LINE] for program in programs]
        done = 0
        while all(len(line) > done for line in lines) and len({line[done] for line in lines}) == 1:
            done += 1
        if any(len(line) > done for line in lines):
            raise ProgramError(
                f"The replicas average a stage's gradients in the same order, and wait for each other forever where "
                f"they do not. Received, on rank {stage} of each:\n" + "\n".join(_who_waits(lines, done))
            )


def _who_waits(lines: Sequence[Sequence[Task]], done: int) -> Iterator[str]:
    heads = [line[done] if len(line) > done else None for line in lines]
    for replica, head in enumerate(heads):
        if head is None:
            yield f"  replica {replica} is through its list"
        else:
            others = ", ".join(str(other) for other, task in enumerate(heads) if task != head)
            yield f"  replica {replica} stands before {head} and waits for replica {others}"
