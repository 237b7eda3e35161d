"""Keras's progress bar in lines, for where there is no terminal.

Keras's own writes over itself with backspaces, twenty times a second. In a file these are there to be read.
"""

from __future__ import annotations

import os
import sys
import time
import types
from typing import Any

from tf_keras import callbacks as keras_callbacks
from tf_keras.src.utils import generic_utils, io_utils

from smp_tf.keras.patch import replaced

#: Seconds between two lines about one epoch.
INTERVAL = 5.0


def is_written_over() -> bool:
    """Returns whether what a bar writes to standard output can be written over: on a terminal or in a notebook."""
    if "ipykernel" in sys.modules or "PYCHARM_HOSTED" in os.environ:
        return True
    # A script may have closed it, or have put an object in its place.
    try:
        return bool(sys.stdout.isatty())
    except (AttributeError, ValueError):
        return False


class ProgressLines(keras_callbacks.ProgbarLogger):
    """Shows the progress of Keras's loops as its own callback does, in a line every few seconds and one at the end.

    Args:
        interval: seconds between two lines about one epoch.
    """

    def __init__(self, interval: float = INTERVAL) -> None:
        super().__init__(count_mode="steps")
        self._interval = interval
        self.progbar: Any

    def _maybe_init_progbar(self) -> None:
        if self.progbar is None:
            self.progbar = _BarInLines(
                target=self.target, verbose=self.verbose, interval=self._interval, unit_name="step"
            )
        super()._maybe_init_progbar()


class _BarInLines(generic_utils.Progbar):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # The first line comes after the interval, too: a short epoch has one line.
        self._last_update = time.time()

    def update(self, current: int, values: Any = None, finalize: bool | None = None) -> None:
        """Writes a line about the progress, if it is time to.

        Args:
            current: number of the step.
            values: names and values of logs.
            finalize: whether it is the last time; None where Keras is to decide that.
        """
        if current == 1:
            # Keras notes it with the first line, which is left out. It does not count the first step.
            self._time_after_first_step = time.time()
        with replaced((generic_utils, "io_utils", types.SimpleNamespace(print_msg=_print_line))):
            super().update(current, values, finalize)


def _print_line(message: str, line_break: bool = True) -> None:
    """Prints what Keras's bar would write over its last state."""
    io_utils.print_msg(message.strip("\b\r\n "))
