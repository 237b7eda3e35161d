"""Returns memory that is free to the system, once, after the first steps of a program.

Tracing, planning and TensorFlow's preparation of a graph take and free much memory in small pieces. The C library keeps
it for later, and hands none of it back as long as anything above it is in use. Steps need far less.

    memory of a rank      ▁▃▅▆▇█████▇▅▅▅▅▅▅▅
                          trace │ step 0 │ 1 │ 2 ...
                                             └ malloc_trim

A separate thread waits for these steps. So a step runs no Python.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from smp_tf.job import runtime
from smp_tf.job.at_shutdown import on_leaving
from smp_tf.job_state import JobState

if TYPE_CHECKING:
    from smp_tf.ops.transport import Transport

#: The step after which memory is returned. The first one makes the optimizer's slots.
_LAST = 1

#: The numbers of the programs whose first steps are, or were, waited for.
_known: JobState[set[int]] = JobState(set)


def return_after_first_steps(program: int) -> None:
    """Returns free memory to the system after the first steps of a program, unless that is done or under way.

    Only trainings of several processes have steps to wait for, and only the GNU C library can be asked.

    Args:
        program: number of the program.
    """
    transport, give_back = runtime.current().transport, returning_function()
    if transport is None or give_back is None or program in _known():
        return
    _known().add(program)
    waiting = _Waiting(program, transport, give_back)
    waiting.start()
    on_leaving(waiting.end)


def returning_function() -> Callable[[], None] | None:
    """Returns a function that hands free memory back to the system; None where the C library has none."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None if trim is None else lambda: trim(0)


class _Waiting:
    def __init__(self, program: int, transport: Transport, give_back: Callable[[], None]) -> None:
        self._program = program
        self._transport = transport
        self._give_back = give_back
        self._thread = threading.Thread(target=self._run, name="smp_tf free memory", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Lets the thread end."""
        self._transport.stop_awaiting()
        self._thread.join()

    def _run(self) -> None:
        if self._transport.await_step(self._program, _LAST, ended=True):
            self._give_back()
