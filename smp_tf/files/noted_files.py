"""Checks whether files that are named now and read later have stayed the same.

`load_weights` before the first step only notes which value belongs to which variable, and its owner reads it at the
first step. If the file were replaced meanwhile, it would silently give other weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from smp_tf.errors import CheckpointError
from smp_tf.files import mounts

_T = TypeVar("_T")
#: A file's identity, where the file system's numbers tell it, its size, and when it was last written; None where there
#: is no file.
_Stamp = tuple[int, int, int] | None


class NotedFiles:
    """Files, with their state now.

    Args:
        paths: paths of the files.
    """

    def __init__(self, *paths: str) -> None:
        self._stamps = {os.path.abspath(path): _stamp(path) for path in paths}

    def read(self, read: Callable[[], _T]) -> _T:
        """Returns what a function reads from the files, and checks that they have not changed.

        Args:
            read: reads from the files, and from no other.

        Raises:
            CheckpointError: a file was replaced, changed or deleted meanwhile.
        """
        self._require_same()
        value = read()
        self._require_same()
        return value

    def _require_same(self) -> None:
        for path, stamp in self._stamps.items():
            if _stamp(path) != stamp:
                raise CheckpointError(
                    f"{path} was replaced, changed or deleted between load_weights, which was given it, and the first "
                    f"step, which reads it. Leave it as it is until the first step has run, or load the weights after "
                    f"that step."
                )


def _stamp(path: str) -> _Stamp:
    try:
        found = os.stat(path)
    except OSError:
        return None
    number = found.st_ino if mounts.has_lasting_numbers(found.st_dev) else 0
    return number, found.st_size, found.st_mtime_ns
