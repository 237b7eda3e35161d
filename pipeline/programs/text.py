"""Reads tasks and programs back from their text."""

from __future__ import annotations

import re

from smp_tf.pipeline.errors import ProgramError, TaskTextError
from smp_tf.pipeline.programs.kinds import KINDS
from smp_tf.pipeline.task import Index, Program, Task

_TASK_TEXT = re.compile(r"(\d+)([A-Z]+)(?:(\d+)(?:\.(\d+))?)?")


def parse(text: str) -> Task:
    """Returns the task that a text such as `2F0` names. It is the inverse of `str(task)`.

    Args:
        text: chunk, kind, and the numbers that distinguish tasks of a kind: `2F0` (chunk 2, microbatch 0), `1T2.5`
            (sweep 2, microbatch 5), `0S3.2` (edge 3, microbatch 2), `0S3` (edge 3, once per step), `0REDUCE1` (bucket
            1), `0APPLY`.

    Returns:
        The task.

    Raises:
        TaskTextError: the text names no task.

    Example:
        >>> from smp_tf.pipeline.task import Kind
        >>> parse("1I3") == Task(Kind.I, chunk=1, microbatch=3)
        True
    """
    match = _TASK_TEXT.fullmatch(text)
    words = {kind.word: kind for kind in KINDS}
    if match is None or match[2] not in words:
        raise TaskTextError(
            "A task is written as chunk, kind, microbatch, for instance 2F0, 1B3, 1T2.5, 0S3.2 or "
            f"0R3.2, with a kind out of {', '.join(words)}. Received: {text!r}"
        )
    kind, chunk = words[match[2]], int(match[1])
    first = None if match[3] is None else int(match[3])
    second = None if match[4] is None else int(match[4])
    if second is not None and kind.index in (Index.MICROBATCH, Index.BUCKET):
        raise TaskTextError(f"A task of kind {kind.name} has one number. Received: {text!r}")
    try:
        match kind.index:
            case Index.EDGE_AND_MICROBATCH:
                return Task(kind, chunk, microbatch=second, edge=first)
            case Index.SWEEP_AND_MICROBATCH:
                return Task(kind, chunk, microbatch=second, sweep=first)
            case Index.MICROBATCH:
                return Task(kind, chunk, microbatch=first)
            case Index.BUCKET:
                return Task(kind, chunk, bucket=first)
    except ProgramError as error:
        raise TaskTextError(f"{error}, in {text!r}") from None


def parse_program(text: str) -> Program:
    """Returns the program that a text names, one rank per line.

    The tasks say how many chunks, microbatches and sweeps there are. Blank lines, and what follows a `#`, do not count.

    Args:
        text: the tasks of one rank per line, separated by spaces.

    Returns:
        The program. Only `check` says whether it can run.

    Raises:
        TaskTextError: a word is not a task, or there is no compute task.

    Example:
        >>> parse_program("0F0 0B0").microbatches
        1
    """
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    ranks = tuple(tuple(parse(word) for word in words) for words in lines if words)
    compute = [task for tasks in ranks for task in tasks if task.kind.is_compute]
    if not compute:
        raise TaskTextError(
            f"A program holds at least one compute task, such as 0F0, one rank per line. Received: {text!r}"
        )
    return Program(
        ranks,
        microbatches=1 + max(task.microbatch or 0 for task in compute),
        chunks=1 + max(task.chunk for task in compute),
        sweeps=1 + max(task.sweep or 0 for task in compute),
    )
