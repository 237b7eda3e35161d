"""Keeps what is meant for standard output or standard error from going into another file.

Where a process is started without one (`python train.py 2>&-`), the next file that it opens has that one's number: a
checkpoint or a connection, say, into which what libraries write to "standard error" then goes.
"""

from __future__ import annotations

import os

_STANDARD = 3


def open_those_missing() -> None:
    """Opens /dev/null in place of those of standard input, output and error that are closed."""
    for descriptor in range(_STANDARD):
        try:
            os.fstat(descriptor)
        except OSError:
            # It has the lowest number that is free, which is this one.
            opened = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(opened, True)
