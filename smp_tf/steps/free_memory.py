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
from collections.abc import Callable

from smp_tf.job import runtime
from smp_tf.job.step_waits import wait_beside_steps
from smp_tf.job_state import JobState

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

    def wait() -> None:
        if transport.await_step(program, _LAST, ended=True):
            give_back()

    wait_beside_steps("free memory", transport, wait)


def returning_function() -> Callable[[], None] | None:
    """Returns a function that hands free memory back to the system; None where the C library has none."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None if trim is None else lambda: trim(0)
