"""Checks paths that a file or another process names. They must stay within their folder and lead through no link.

"mp_rank_0/ckpt-3"  is one; "../thesis", "/etc/passwd", "a/../../b", "./a" and "link/a" are not.
"""

from __future__ import annotations

import os
from pathlib import PurePosixPath
from typing import Any


class PathError(ValueError):
    """A path may leave its folder. The message is the end of a sentence that begins with the path."""


def relative(text: Any, folder: str | os.PathLike[str]) -> PurePosixPath:
    """Returns a path that stays within its folder, as far as its text tells.

    Args:
        text: what was read or received. It may be anything; the parts of a path are separated by "/".
        folder: the folder that it must stay in, for the message.

    Raises:
        PathError: it is no text, is absolute, has the part "." or "..", or cannot be the name of a file.
    """
    path = PurePosixPath(text) if isinstance(text, str) and text and "\0" not in text else PurePosixPath("..")
    if path.is_absolute() or ".." in path.parts or not path.parts or str(path) != text or not _is_encodable(text):
        raise PathError(f"must stay within {os.fspath(folder)!r}. Received: {text!r}")
    return path


def within(folder: str | os.PathLike[str], text: Any) -> str:
    """Returns where a path lies in its folder. Call it right before the use, since links may be made later.

    Args:
        folder: the folder that it must stay in. It may be a link itself, since this process chose it.
        text: what was read or received, which may be anything.

    Raises:
        PathError: it may leave the folder, by its text or through a symbolic link.
    """
    at = os.fspath(folder)
    for part in relative(text, folder).parts:
        at = os.path.join(at, part)
        if os.path.islink(at):
            raise PathError(
                f"{text!r} leads through {at!r}, a symbolic link, which may leave {os.fspath(folder)!r}. Remove the "
                f"link first."
            )
    return at


def _is_encodable(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True
