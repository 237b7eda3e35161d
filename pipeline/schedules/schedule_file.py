"""Reads a written schedule: one rank per line, with its tasks in order.

    # 2 stages, 3 microbatches: 1F1B, backward of rank 1 in two pieces
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2

A task is written as chunk, kind, microbatch, all counted from 0: `1I2` is the first piece of backward (I, before W) of
chunk 1 for microbatch 2. Any chunk may be on any rank. Every schedule is checked when it is loaded, so that it can run.
"""

from __future__ import annotations

from pathlib import Path

from smp_tf.pipeline.errors import ProgramError, ScheduleError, TaskTextError, require_at_least
from smp_tf.pipeline.programs.check import check
from smp_tf.pipeline.programs.text import parse, parse_program
from smp_tf.pipeline.task import Kind, Program, Task

_WRITTEN = (Kind.F, Kind.B, Kind.I, Kind.W)


def load_schedule(source: Path | str, stages: int | None = None, microbatches: int | None = None) -> Program:
    """Returns the training program that a file or a text lists, checked.

    Args:
        source: the path of a file, as a `pathlib.Path`; or the text itself.
        stages: how many ranks there are, and so lines with tasks; None for as many as the schedule has.
        microbatches: how many microbatches a step runs; None for as many as the schedule has.

    Returns:
        A program of F, B, I and W tasks. `add_transfers` puts the sends and receives in. `sweeps.forward_only` and
        `sweeps.with_sweeps` derive the other programs that `build` makes of a named schedule.

    Raises:
        ScheduleError: the schedule cannot be read, is not for these numbers, or cannot run. The message names the file,
            the line and the rule.

    Example:
        >>> load_schedule("0F0 0B0 # the first rank", stages=1, microbatches=1).text()
        '0F0 0B0'
    """
    if stages is not None:
        require_at_least(1, "stages", stages)
    if microbatches is not None:
        require_at_least(1, "microbatches", microbatches)
    name, text = _read(source)
    try:
        lines = _tasks(name, text)
    except ScheduleError as error:
        hint = " The path of a file is given as pathlib.Path" if isinstance(source, str) else ""
        raise ScheduleError(f"{error}.{hint}" if hint else str(error)) from None
    if not lines:
        raise ScheduleError(
            f"{name}: A schedule lists the tasks of a rank on a line, such as 0F0 0B0. Received: no task"
        )
    numbers = list(lines)
    if stages is not None and len(lines) != stages:
        raise ScheduleError(
            f"{name}, line {numbers[-1]}: A schedule has one line per rank, for {stages} ranks {stages} lines. "
            f"Received: {len(lines)}, this one being the last"
        )
    read = parse_program(text)
    microbatches = read.microbatches if microbatches is None else microbatches
    for number, tasks in lines.items():
        for task in tasks:
            assert task.microbatch is not None
            if task.microbatch >= microbatches:
                raise ScheduleError(
                    f"{name}, line {number}: A task is for one of the microbatches that a step runs, 0 to "
                    f"{microbatches - 1}. Received: {task}"
                )
    if read.microbatches < microbatches:
        raise ScheduleError(
            f"{name}: A schedule runs as many microbatches as a step has, {microbatches}. Received: "
            f"one of {read.microbatches}"
        )
    # The sizes that were asked for are used, so that a missing last microbatch or missing backwards are noticed.
    program = Program(read.ranks, microbatches, read.chunks, sweeps=2)
    try:
        check(program)
    except ProgramError as error:
        where = ", ".join(f"line {numbers[rank]}" for rank in error.ranks)
        raise ScheduleError(f"{name}{', ' if where else ''}{where}: {error}") from None
    return program


def _read(source: Path | str) -> tuple[str, str]:
    if isinstance(source, str):
        return "the schedule", source
    try:
        return str(source), source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"{source}: A schedule is a text file that can be read. Received: {error}") from None


def _tasks(name: str, text: str) -> dict[int, list[Task]]:
    """Returns the tasks of each line that has some, by the line's number."""
    lines: dict[int, list[Task]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        for word in line.partition("#")[0].split():
            try:
                task = parse(word)
            except TaskTextError as error:
                raise ScheduleError(f"{name}, line {number}: {error}") from None
            if task.kind not in _WRITTEN:
                raise ScheduleError(
                    f"{name}, line {number}: A schedule lists F, B, I and W tasks; all others are put in by "
                    f"smp_tf. Received: {word}"
                )
            lines.setdefault(number, []).append(task)
    return lines
