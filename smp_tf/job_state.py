"""State that belongs to a job. It is made when it is first asked for, and dropped at `smp.shutdown`.

    _made: JobState[list[StoredPlan]] = JobState(list)     declared in the file that it belongs to
    _made().append(plan)                                   the first call in a job makes the list
    smp.shutdown()                                         drops it, with the state of all other files

State that must also be undone, such as a lock or a patch, is handled by `smp_tf.job.at_shutdown`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

#: The state of the running job. It is kept only here.
_values: dict[JobState[Any], Any] = {}
# A signal handler may ask in the thread that it interrupts, and one piece of state may need another.
_lock = threading.RLock()


class JobState(Generic[T]):
    """One piece of a job's state.

    Args:
        make: Makes the state, without arguments.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make

    def __call__(self) -> T:
        """Returns the state of the running job, or of the next one where none runs yet."""
        with _lock:
            if self not in _values:
                _values[self] = self._make()
            value: T = _values[self]
            return value

    def put(self, value: T) -> None:
        """Replaces the state by another one, until the job ends."""
        _values[self] = value


def drop_all() -> None:
    """Drops the state of the job that has ended. Only `smp.shutdown` does this."""
    _values.clear()
