"""Prints what a command says: its result, notes, and what is wrong with its arguments."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from smp_tf.offline.user_errors import in_a_line


class UsageError(Exception):
    """Something on the command line is wrong."""


def say(text: str) -> None:
    """Tells the user of a command something besides its result.

    Args:
        text: the text, without the name of the command.
    """
    put(f"smp-tf: {in_a_line(text)}", sys.stderr)


def show(text: str, end: str = "\n") -> None:
    """Prints the result of a command.

    Args:
        text: any number of lines.
        end: what is to stand after it.

    Raises:
        UsageError: it cannot be written, such as on a full disk.
    """
    try:
        put(text, sys.stdout, end)
    except OSError as error:
        raise UsageError(f"The output cannot be written: {error.strerror}.") from error


def put(text: str, to: TextIO | None, end: str = "\n") -> None:
    """Prints a text. What nobody reads, as after `head -1`, is dropped.

    Args:
        text: any number of lines.
        to: the output of this process; None where it has none.
        end: what is to stand after it.

    Raises:
        OSError: it cannot be written.
    """
    if to is None:
        return
    try:
        try:
            # In one piece: `print` would write the end of the line separately, and another thread's line between.
            to.write(f"{text}{end}")
        except UnicodeEncodeError:
            to.write(f"{text.encode(to.encoding, 'replace').decode(to.encoding)}{end}")
        to.flush()
    except OSError as error:
        # Buffered text, which Python writes when it ends, is dropped, too.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, to.fileno())
        os.close(nowhere)
        if not isinstance(error, BrokenPipeError):
            raise
