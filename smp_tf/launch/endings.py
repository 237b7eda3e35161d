"""How a process ended: as words, and as an exit code that a batch system understands."""

from __future__ import annotations

import signal

#: What a shell adds to the number of the signal that ended a process.
_SIGNALLED = 128
#: The exit code of a job that has lost a host.
HOST_LOST = 1


def exit_code(status: int) -> int:
    """Returns the exit code for a status.

    Args:
        status: of a process as `subprocess` gives it; negative: the signal that ended it.
    """
    return status if status >= 0 else _SIGNALLED - status


def signal_of(status: int) -> int | None:
    """Returns the signal that ended a process, also where it stands in the exit code as shells put it there."""
    number = -status if status < 0 else status - _SIGNALLED
    return number if number > 0 and number in set(signal.Signals) else None


def name_of(number: int) -> str:
    """Returns the name of a signal, such as "SIGKILL"."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def in_words(status: int) -> str:
    """Returns how a process ended, to follow "rank 1"."""
    number = signal_of(status)
    if number is not None:
        return f"killed by {name_of(number)} (exit code {exit_code(status)})"
    return f"exit code {status}"


#: What often lies under a signal, and what to do.
_OFTEN = {
    signal.SIGKILL: (
        "often it is the out-of-memory killer",
        "`dmesg | grep -i oom` tells. More partitions, more microbatches or `recompute` need less memory",
    ),
    signal.SIGSEGV: ("native code failed", "`-x PYTHONFAULTHANDLER=1` shows where in Python"),
    signal.SIGABRT: ("native code gave up", "its last lines say why; `-x PYTHONFAULTHANDLER=1` shows where in Python"),
    signal.SIGBUS: ("often /dev/shm is full, or a file was cut while it was in use", "`df /dev/shm` tells"),
    signal.SIGILL: ("this processor lacks instructions that a library was compiled for", "install a build for it"),
    signal.SIGTERM: (
        "something outside the job ended it",
        "look whether a batch system, a limit or an operator did; --restarts goes on by itself",
    ),
}


def often(status: int) -> tuple[str, str] | None:
    """Returns what often lies under such an end, and what to do; None where nothing is known."""
    number = signal_of(status)
    return None if number is None else _OFTEN.get(signal.Signals(number))
