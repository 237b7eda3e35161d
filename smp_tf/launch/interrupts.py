"""Signals that end a job: the first ends all ranks in order, a second one kills them at once.

What they do is done by their handlers. So it is done as well while this process waits for the reader of its output.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Hears signals within its context.

    Args:
        act: called with the number of each signal, and with how many have come.

    Attributes:
        first: the number of the first signal; None before.
        descriptor: becomes readable with each signal, a change of the terminal's size included.
    """

    def __init__(self, act: Callable[[int, int], object]) -> None:
        self.first: int | None = None
        self._act = act
        self._count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        self.descriptor, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        for number in _SIGNALS:
            # Under `nohup` a signal is ignored, and stays so.
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._hear)
        self._before[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda *_: None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self.descriptor)
        os.close(self._writing)

    def heard(self) -> set[int]:
        """Returns the signals that have come since the last call."""
        try:
            return set(os.read(self.descriptor, 4096))
        except BlockingIOError:
            return set()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        self.first = self.first or number
        self._act(number, self._count)
