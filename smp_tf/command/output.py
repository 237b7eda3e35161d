"""Prints what a command says: its result, what else there is, and that something given is wrong."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from smp_tf.offline.user_errors import in_a_line


class UsageError(Exception):
    """Something given on the command line is wrong."""


def say(text: str) -> None:
    """Tells the user of a command something that is not its result.

    Args:
        text: without the name of the command.
    """
    put(f"smp-tf: {in_a_line(text)}", sys.stderr)


def show(text: str, end: str = "\n") -> None:
    """Prints the result of a command.

    Args:
        text: of any number of lines.
        end: what is to stand after it.

    Raises:
        UsageError: it cannot be written, as on a full disk.
    """
    try:
        put(text, sys.stdout, end)
    except OSError as error:
        raise UsageError(f"The output cannot be written: {error.strerror}.") from error


def put(text: str, to: TextIO | None, end: str = "\n") -> None:
    """Prints a text; what is read no further, as by `head -1`, goes nowhere.

    Args:
        text: of any number of lines.
        to: this process's output; None where it has none.
        end: what is to stand after it.

    Raises:
        OSError: it cannot be written.
    """
    if to is None:
        return
    try:
        try:
            print(text, file=to, end=end, flush=True)
        except UnicodeEncodeError:
            print(text.encode(to.encoding, "replace").decode(to.encoding), file=to, end=end, flush=True)
    except OSError as error:
        # So does what is still held, which Python writes when it ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, to.fileno())
        os.close(nowhere)
        if not isinstance(error, BrokenPipeError):
            raise
