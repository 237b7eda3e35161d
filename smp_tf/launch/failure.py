"""Says at the end of a failed job who failed, where, why, and what to do."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from smp_tf.launch import endings
from smp_tf.launch.endings import HOST_LOST
from smp_tf.launch.job import JobEnd, RankEnd
from smp_tf.launch.printed_error import printed_error

#: What smp_tf says at the end on every rank: what the cause is, or first which rank is.
_CAUSE = re.compile(r"smp_tf: \[rank \d+\] (?P<words>.*)")
_OF_RANK = re.compile(r"rank (?P<rank>\d+) \(host [^)]*\) (?P<why>(?:failed: |ends the job: |was lost: ).*)")
#: Where an exception was raised, at the end of what smp_tf says.
_AT = re.compile(r" \(at (?P<place>.*)\)$")
#: Where another rank was when it lost one.
_STEP = re.compile(r"(?P<place>Rank \d+) \(host [^)]*\) was (?P<step>(?:before|in|after) .*)")
#: What ranks say of one that they have lost before they were connected.
_IN_START = re.compile(
    r"Rank (?P<rank>\d+) \(host [^)]*\) ended (?P<doing>while .*?)(?: \(smp_tf\.|\. )"
    r"|was ended by SIGTERM (?P<when>before|in) smp\.init: rank (?P<lost>\d+) \(host"
)
_LONGEST = 600
#: Characters by which messages are told apart.
_TOLD_APART = 60


@dataclass(frozen=True)
class Failure:
    """What is known of a failure.

    Args:
        who: the rank, its host and process, and how it ended.
        why: in one line.
        where: the place in the script; None where it is not known.
        advice: what to do.
        code: the exit code of the job.
    """

    who: str
    why: str
    where: str | None
    advice: Sequence[str]
    code: int


def failure_of(
    end: JobEnd, said: Sequence[tuple[int, str]], kept: Sequence[Iterable[str]], log: Path | None
) -> Failure:
    """Returns what is known of the failure of a job.

    Args:
        end: the end of the job, in which a rank has failed.
        said: what smp_tf has said, with the rank that printed it.
        kept: what each rank has printed last.
        log: the file of the ranks' output with "{rank}" in it; None where there is none.
    """
    failed = [rank_end for rank_end in end.ends if rank_end.has_failed]
    first = next((rank_end for rank_end in failed if not rank_end.is_asked), failed[0])
    cause = next((found["words"] for _, line in said if (found := _CAUSE.match(line)) is not None), None)
    guilty, known = _guilty(failed, first, cause, kept)
    if known is None:
        known = next((line.removeprefix("smp_tf: ") for rank, line in reversed(said) if rank == guilty.rank), None)
    why, where, advice = _story(guilty, known, kept[guilty.rank], end)
    if known is not None and known == cause:
        # Ranks differ. The words name them, and the error of each is its own.
        why = known
    where = where or _start_of(guilty.rank, [line for lines in kept for line in lines])
    decisive = first if guilty.is_asked or guilty.status is None else guilty
    return Failure(
        who=f"rank {guilty.rank} of {len(kept)} (host {guilty.host}, process {guilty.pid}), {_end_in_words(guilty)}",
        why=why if len(why) <= _LONGEST else f"{why[:_LONGEST]}...",
        where=where,
        advice=[*advice, _where_more_is(guilty, log)],
        code=HOST_LOST if decisive.status is None else endings.exit_code(decisive.status),
    )


def _guilty(
    failed: Sequence[RankEnd], first: RankEnd, cause: str | None, kept: Sequence[Iterable[str]]
) -> tuple[RankEnd, str | None]:
    """Returns the rank to be named, and what smp_tf says of it; None where that is nothing.

    Args:
        failed: the ranks that have failed.
        first: the one that did so first.
        cause: what smp_tf says at the end; None where it says nothing.
        kept: what each rank has printed last.
    """
    if cause is None:
        return first, None
    named = _OF_RANK.match(cause)
    if named is not None:
        guilty = next((end for end in failed if end.rank == int(named["rank"])), None)
        return (first, None) if guilty is None else (guilty, named["why"])
    for end in failed:
        error = printed_error(kept[end.rank])
        if error is not None and cause.startswith(error.words.partition(": ")[2][:_TOLD_APART] or "\n"):
            return end, cause
    return first, cause


def _end_in_words(end: RankEnd) -> str:
    if end.status is None:
        return "lost with its host"
    words = endings.in_words(end.status)
    return f"{words}, after it was told to end" if end.is_asked else words


def _story(
    guilty: RankEnd, known: str | None, printed: Iterable[str], end: JobEnd
) -> tuple[str, str | None, list[str]]:
    """Returns why a rank has failed, where, and what to do about it.

    Args:
        guilty: its end.
        known: what smp_tf says of it; None where that is nothing.
        printed: what it has printed last.
        end: of the job.
    """
    step = _STEP.search(known or "")
    where = f"{step['place'].lower()} was {step['step']}" if step is not None else None
    if guilty.status is None:
        words = "; ".join(end.last_words.get(guilty.host, [])) or "it said nothing"
        return f"the connection to host {guilty.host} ended: {words}", where, []
    often = None if guilty.is_asked else endings.often(guilty.status)
    if often is not None:
        return often[0], where, [often[1]]
    error = printed_error(printed)
    if error is not None:
        return error.words, error.place, []
    if known is not None:
        at = _AT.search(known)
        return _AT.sub("", known).removeprefix("failed: "), where if at is None else at["place"], []
    return "it printed no error; its last lines are above", where, []


def _start_of(rank: int, printed: Iterable[str]) -> str | None:
    """Returns where in its start a rank was when others lost it, as these have said; None where none has.

    Args:
        rank: the rank.
        printed: what all ranks have printed last.
    """
    for line in printed:
        found = _IN_START.search(line)
        if found is not None and int(found["rank"] or found["lost"]) == rank:
            return str(found["doing"] or f"{found['when']} smp.init")
    return None


def _where_more_is(guilty: RankEnd, log: Path | None) -> str:
    if log is None:
        return "--log-dir FOLDER keeps the output of each rank in a file of its own"
    return f"all that rank {guilty.rank} printed is in {str(log).format(rank=guilty.rank)}"


def render(failure: Failure, title: str, width: int | None, is_colored: bool) -> str:
    """Returns the block that tells of a failure, without the end of its last line.

    Args:
        failure: what is known.
        title: a sentence about the job.
        width: columns of the terminal; None where there is none, and lines may be of any length.
        is_colored: whether the terminal shows colors.
    """
    rows = [("who", failure.who), ("where", failure.where), ("why", failure.why)]
    rows += [("what to do" if not number else "", words) for number, words in enumerate(failure.advice)]
    told = [(name, words) for name, words in rows if words is not None]
    if width is None:
        return "\n".join([f"smp-tf: {title}", *(f"  {name:<10}  {words}" for name, words in told)])
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, words in told:
        table.add_row(name, Text(words))
    text = io.StringIO()
    console = Console(
        file=text, width=width, force_terminal=is_colored, color_system="standard" if is_colored else None
    )
    console.print(Panel(table, title=Text(f"smp-tf: {title}"), title_align="left", border_style="red"))
    return text.getvalue().rstrip("\n")
