"""What the options of several benchmarks take."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

Found = TypeVar("Found")


def counts(text: str) -> list[int]:
    """Numbers between commas, each larger than the one before."""
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or found != sorted(set(found)) or found[0] < 1:
        raise argparse.ArgumentTypeError(f"expected rising numbers from 1 on, such as 1,2,4. Received: {text}")
    return found


def some_of(known: Collection[str], what: str) -> Callable[[str], list[str]]:
    """Returns the type of an option that takes known names between commas.

    Args:
        known: the known names.
        what: what they name, for messages.
    """

    def names(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"{what} are {', '.join(known)}. Received: {', '.join(unknown)}")
        return found

    return names


def new_file(text: str) -> Path:
    """Returns a file whose folder exists: a measurement takes long, and is written at its end."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that is there. Received: {text}")
    return path


def named(find: Callable[[str], Found], text: str, option: str, parser: argparse.ArgumentParser) -> Found:
    """Returns what an option names. The option itself keeps its text, which is printed and written.

    Args:
        find: finds it by its name, or raises a ValueError.
        text: the name as it was given.
        option: the option, such as "--size".
        parser: ends the program where nothing has that name.
    """
    try:
        return find(text)
    except ValueError as error:
        parser.error(f"{option}: {error}")
