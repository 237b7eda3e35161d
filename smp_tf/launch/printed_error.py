"""Finds in what a rank has printed the error that ended it: its words, the line of the script, the layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

#: How smp_tf's words at the end of a job begin.
_AT_THE_END = "smp_tf: [rank "
_TRACEBACK = "Traceback (most recent call last):"
#: A line of a traceback, also of one that Keras puts into the message of an error.
_FRAME = re.compile(r'\s+File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+?)\s*\**$')
#: An error within the message of another one.
_INNER = re.compile(r"\s+(?P<words>[A-Z][\w.]*(?:Error|Exception|Interrupt|Exit): .+)")
_LAYER = re.compile(r"Exception encountered when calling layer (?P<layer>'[^']+' \(type \w+\)|\"[^\"]+\" \(type \w+\))")
#: The op in which an error of TensorFlow's has come up, and how such an error begins.
_OP = re.compile(r"\{\{node (?P<op>[^}]+)\}\}")
_IN_A_GRAPH = "Graph execution error:"
#: How AutoGraph begins the message of an error in a function that it has rewritten.
_IN_USER_CODE = "in user code:"
_BEFORE_WORDS = ("Detected at node ", "<stack traces unavailable>")
#: Modules whose names before that of an error say nothing to the user.
_MODULES = re.compile(r"^(?:tensorflow|tf_keras|smp_tf)(?:\.\w+)*\.(?=\w+(?::|$))")
#: Files whose lines are no script's.
_LIBRARIES = re.compile(r"/(?:site-packages|dist-packages|lib/python[\d.]+)/|^<frozen |__autograph_generated_file")
_ROOT = Path(__file__).resolve().parents[1]
#: In a checkout some rooms are next to the folder smp_tf.
_OF_SMP_TF = (f"{_ROOT}/", *(f"{_ROOT.parent}/{name}/" for name in ("ops", "partition", "pipeline")))


@dataclass(frozen=True)
class PrintedError:
    """An error that a rank has printed.

    Args:
        words: its type and message, in one line.
        place: the line of the script, and the layer or op where one is named; None where nothing is known.
    """

    words: str
    place: str | None


def printed_error(lines: Iterable[str]) -> PrintedError | None:
    """Returns the error of the last traceback before smp_tf's words at the end; None where there is none.

    A script may print others after these, when it ends. Where there is none before them, it is the last of all.

    Args:
        lines: what a rank has printed last.
    """
    told = list(lines)
    begins = [number for number, line in enumerate(told) if line.strip() == _TRACEBACK]
    if not begins:
        return None
    end = next((number for number, line in enumerate(told) if line.startswith(_AT_THE_END)), len(told))
    begins = [number for number in begins if number < end] or begins
    rest = told[begins[-1] + 1 :]
    # Python 3.11 does not indent all marks under the source.
    ends = [number for number, line in enumerate(rest) if line[:1].strip() and line.strip("^~ ")]
    if not ends:
        return None
    words, message, place = rest[ends[0]], _message(rest[ends[0] + 1 :]), _place(rest[: ends[0]])
    layers = [found["layer"] for line in (words, *message) if (found := _LAYER.search(line)) is not None]
    ops = [found["op"] for line in (words, *message) if (found := _OP.search(line)) is not None]
    if layers or words.endswith(_IN_USER_CODE):
        words, place = _within_layers(words, message, place)
        place = _joined(f"layer {layers[-1]}", place) if layers else place
    elif ops:
        words, place = _with_next_line(words, message), _joined(f"op {ops[0]}", place)
    return PrintedError(_MODULES.sub("", words), place)


def _message(lines: Sequence[str]) -> list[str]:
    """Returns the lines that may belong to the message of an error: those before smp_tf says something."""
    ends = [number for number, line in enumerate(lines) if line.startswith("smp_tf: ")]
    return list(lines[: ends[0]] if ends else lines)


def _within_layers(words: str, message: Sequence[str], place: str | None) -> tuple[str, str | None]:
    """Returns the words and the place of an error that Keras or AutoGraph has put into the message of others."""
    inner = [(number, found["words"]) for number, line in enumerate(message) if (found := _INNER.match(line))]
    own = [(number, text) for number, text in inner if _LAYER.search(text) is None]
    if not own:
        return words, place
    number, text = own[-1]
    return text, _place(message[:number]) or place


def _with_next_line(words: str, message: Sequence[str]) -> str:
    """Returns the words of an error in a graph, which stand some lines after its begin."""
    if not words.endswith(_IN_A_GRAPH):
        return words
    said = [line.strip() for line in message if line.strip() and _FRAME.match(line) is None]
    said = [line for line in said if not line.startswith(_BEFORE_WORDS)]
    return f"{words.removesuffix(_IN_A_GRAPH)}{said[0]}" if said else words


def _place(lines: Iterable[str]) -> str | None:
    """Returns the last line of the script among the lines of a traceback; the last one where none is the script's."""
    frames = [found for line in lines if (found := _FRAME.match(line)) is not None]
    chosen = ([found for found in frames if _is_script(found["file"])] or frames)[-1:]
    return f"{chosen[0]['file']}:{chosen[0]['line']} in {chosen[0]['name']}" if chosen else None


def _is_script(file: str) -> bool:
    return not _LIBRARIES.search(file) and not file.startswith(_OF_SMP_TF)


def _joined(first: str, place: str | None) -> str:
    return first if place is None else f"{first}, {place}"
