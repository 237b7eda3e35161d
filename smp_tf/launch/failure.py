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

#: What smp_tf says of the rank whose end is the cause, on every rank.
_CAUSE = re.compile(
    r"smp_tf: (?:\[rank \d+\] )?rank (?P<rank>\d+) \(host [^)]*\) "
    r"(?P<why>(?:failed: |ends the job: |was lost: |was ended by ).*)"
)
#: Where an exception was raised, at the end of what smp_tf says.
_AT = re.compile(r" \(at (.*)\)$")
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'\s+File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)')
#: Files whose lines are no script's.
_LIBRARIES = re.compile(r"/(?:site-packages|dist-packages|lib/python[\d.]+)/|^<frozen ")
_OF_SMP_TF = str(Path(__file__).resolve().parents[1])
_LONGEST = 1000


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
    end: JobEnd, said: Iterable[tuple[int, str]], kept: Sequence[Sequence[str]], log: Path | None
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
    cause = next(filter(None, (_CAUSE.match(line) for _, line in said)), None)
    guilty = first
    if cause is not None:
        guilty = next((rank_end for rank_end in failed if rank_end.rank == int(cause["rank"])), first)
    own = kept[guilty.rank]
    raised, frames = _last_traceback(own)
    why = _why(guilty, raised, cause["why"] if cause is not None and int(cause["rank"]) == guilty.rank else None, end)
    at = _AT.search(why)
    where = _place(frames) or (at[1] if at is not None else None)
    code = first if guilty.is_asked or guilty.status is None else guilty
    return Failure(
        who=f"rank {guilty.rank} of {len(kept)} (host {guilty.host}, process {guilty.pid}), {_end_in_words(guilty)}",
        why=_cut(_AT.sub("", why)),
        where=where,
        advice=_advice(guilty, log),
        code=HOST_LOST if code.status is None else endings.exit_code(code.status),
    )


def _end_in_words(end: RankEnd) -> str:
    if end.status is None:
        return "lost with its host"
    words = endings.in_words(end.status)
    return f"{words}, after it was told to end" if end.is_asked else words


def _why(guilty: RankEnd, raised: str | None, said: str | None, end: JobEnd) -> str:
    if guilty.status is None:
        words = "; ".join(end.last_words.get(guilty.host, [])) or "it said nothing"
        return f"the connection to host {guilty.host} ended: {words}"
    often = endings.often(guilty.status)
    if often is not None and not guilty.is_asked:
        return f"{endings.in_words(guilty.status)}: {often}"
    if said is not None:
        return said.removeprefix("failed: ")
    return raised or "it printed no error; its last lines are above"


def _advice(guilty: RankEnd, log: Path | None) -> list[str]:
    if log is None:
        return ["--log-dir FOLDER keeps the output of each rank in a file of its own"]
    return [f"all that rank {guilty.rank} printed is in {str(log).format(rank=guilty.rank)}"]


def _last_traceback(lines: Sequence[str]) -> tuple[str | None, list[re.Match[str]]]:
    """Returns the last line of the last traceback, and its frames."""
    begins = [number for number, line in enumerate(lines) if line.strip() == _TRACEBACK]
    if not begins:
        return None, []
    frames: list[re.Match[str]] = []
    for line in list(lines)[begins[-1] + 1 :]:
        found = _FRAME.match(line)
        if found is not None:
            frames.append(found)
        elif line and not line[0].isspace():
            return line, frames
    return None, frames


def _place(frames: Sequence[re.Match[str]]) -> str | None:
    """Returns the last line of the script in a traceback; the last of all where no line is the script's."""
    own = [found for found in frames if not _LIBRARIES.search(found["file"]) and _OF_SMP_TF not in found["file"]]
    chosen = (own or list(frames))[-1:]
    return f"{chosen[0]['file']}:{chosen[0]['line']} in {chosen[0]['name']}" if chosen else None


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


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
