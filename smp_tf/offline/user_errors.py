r"""Describes somebody else's error in one line: where in the user's code it is, its type, and its first words.

ValueError("no data\nat all")  ─ Keras, AutoGraph ─▶  ValueError("in user code: ... Call arguments received ...")
            │                                                                       │
            └───────── "in load at line 7 of data.py: ValueError: no data" ◀────────┘
"""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Characters that end a line, or that a terminal would not show as they are.
_NOT_SHOWN = re.compile(r"\s*[\x00-\x1f\x7f-\x9f\u2028\u2029]+\s*")
#: The begin of the message of an error that Keras or AutoGraph has made from another one.
_MADE_ANEW = ("Exception encountered when calling", "in user code:")
#: How much of the message of somebody else's error is shown.
_LONGEST = 500
#: Packages whose folders hold no code of the user's.
_PACKAGES = ("smp_tf", "smp_tf.partition", "smp_tf.pipeline", "smp_tf.ops")


def in_a_line(text: str) -> str:
    r"""Returns a text of several lines as one line.

    Example:
        >>> in_a_line("no data\n  at all")
        'no data at all'
    """
    return _NOT_SHOWN.sub(" ", text).strip()


def told(error: BaseException, file: str | None = None, function: str | None = None) -> str:
    r"""Returns words for an error, to follow the words for what failed: where in the user's code, type and message.

    Args:
        error: the error, perhaps one that Keras or AutoGraph has made from the user's.
        file: a file that need not be named where the error is in it.
        function: a function of the file that need not be named.

    Example:
        >>> told(ValueError("no data\nat all"))
        ': ValueError: no data'
    """
    place = ""
    for frame in _frames(error):
        if not _is_the_users(frame.filename, file):
            continue
        is_there = file is not None and Path(frame.filename) == Path(file).absolute()
        is_known = frame.name == "<module>" or (is_there and frame.name == function)
        within, of = "" if is_known else f" in {frame.name}", "" if is_there else f" of {frame.filename}"
        place = f"{within} at line {frame.lineno}{of}"
        break
    return f"{place}: {words_of(error)}"


def words_of(error: BaseException) -> str:
    """Returns the type of an error, and the first line of its message that is not empty.

    Args:
        error: the error, perhaps one that Keras or AutoGraph has made from the user's.
    """
    error = first_of(error)
    lines = (in_a_line(line) for line in text_of(error).splitlines())
    said = next((line for line in lines if line and not line.startswith(_MADE_ANEW)), "")
    said = said if len(said) <= _LONGEST else f"{said[:_LONGEST]}..."
    return f"{type(error).__name__}{': ' if said else ''}{said}"


def text_of(value: Any) -> str:
    """Returns the text of a value, such as an error; "" for a value of a user's class without a text."""
    try:
        return str(value)
    except Exception:
        return ""


def first_of(error: BaseException) -> BaseException:
    """Returns the error that was raised first, where Keras and AutoGraph have made others from it."""
    return _chain_of(error)[-1]


def _chain_of(error: BaseException) -> list[BaseException]:
    chain = [error]
    while chain[-1].__context__ is not None and text_of(chain[-1]).startswith(_MADE_ANEW):
        chain.append(chain[-1].__context__)
    return chain


def _frames(error: BaseException) -> Iterator[traceback.FrameSummary]:
    """Yields the frames that an error came from, the innermost first."""
    for seen in reversed(_chain_of(error)):
        # Code that AutoGraph has converted ran in another file. AutoGraph knows the original.
        for frame in getattr(getattr(seen, "ag_error_metadata", None), "translated_stack", ()):
            name = frame.function_name or "<lambda>"
            yield traceback.FrameSummary(frame.filename, frame.lineno, name, lookup_line=False)
        yield from reversed(traceback.extract_tb(seen.__traceback__))


def _is_the_users(filename: str, file: str | None) -> bool:
    """Returns whether code is the user's, and neither an installed library's nor smp_tf's."""
    path = Path(filename)
    if file is not None and path == Path(file).absolute():
        return True
    if filename.startswith("<") or path.name.startswith("__autograph_generated_file"):
        return False
    own = [sys.modules[name].__file__ for name in _PACKAGES if name in sys.modules]
    libraries = [Path(sysconfig.get_path("stdlib")), *(Path(found).parent for found in own if found)]
    return not {"site-packages", "dist-packages"} & {*path.parts} and not any(path.is_relative_to(p) for p in libraries)
