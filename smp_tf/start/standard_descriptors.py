"""Keeps text for standard output or standard error from going into another file.

A process may be started without one of them (`python train.py 2>&-`). Then the next file that it opens, such as a
checkpoint or a connection, gets its number. What libraries write to "standard error" would go into that file.
"""

from __future__ import annotations

import os

_STANDARD = 3


def open_those_missing() -> None:
    """Opens /dev/null for each of standard input, output and error that is closed."""
    for descriptor in range(_STANDARD):
        try:
            os.fstat(descriptor)
        except OSError:
            # It gets the lowest free number, which is this one.
            opened = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(opened, True)
