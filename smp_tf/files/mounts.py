"""Tells whether a file system is mounted at a path, and whether its files keep their numbers."""

from __future__ import annotations

import os
import re

_TABLE = "/proc/self/mountinfo"


def is_mount(path: str) -> bool:
    """Returns whether something is mounted at a path, be it a folder of the same file system.

    Args:
        path: path of a file or folder.
    """
    place = os.path.realpath(path)
    return os.path.ismount(place) or any(point == os.fsencode(place) for _, point, _ in _mounted())


def has_lasting_numbers(device: int) -> bool:
    """Returns whether a file keeps its number (`st_ino`) as long as it exists.

    A file system that a program provides (FUSE) often gives a file another number after a while.

    Args:
        device: `st_dev` of the file.
    """
    name = f"{os.major(device)}:{os.minor(device)}".encode()
    return not any(number == name and kind.startswith(b"fuse") for number, _, kind in _mounted())


def _mounted() -> list[tuple[bytes, bytes, bytes]]:
    """Returns device, place and type of everything mounted; nothing where the system does not say."""
    try:
        with open(_TABLE, "rb") as file:
            lines = [line.split() for line in file]
        # A dash ends fields whose number varies.
        return [(words[2], _unescaped(words[4]), words[words.index(b"-", 6) + 1]) for words in lines]
    except (OSError, ValueError, IndexError):
        return []


def _unescaped(point: bytes) -> bytes:
    return re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), point)
