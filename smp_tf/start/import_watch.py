"""Lets a rank that is ended between `import smp_tf` and `smp.init` say whose process had ended before.

    import smp_tf ──▶ a handler of SIGTERM ──▶ smp.init: StartWatch hears it from here on
                              │
                              ▼
       "rank 0 (host a) was ended by SIGTERM before smp.init: rank 1 (host a, pid 7) had ended."

Before the import no code of smp_tf runs. A script that imports TensorFlow first is ended there without a word. So is a
script that is in native code for seconds when the launcher kills it, since Python calls handlers only between two of
its own steps. Horovod may be in native code for long. Where the script starts it itself, SIGTERM is left as it was.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

# Imported here, with all that finds the words, since a handler may run in the midst of another import.
from smp_tf.announce import tell_in_time
from smp_tf.start.arrivals import Arrivals, this_host
from smp_tf.start.environment import world_rank

_watch: _ImportWatch | None = None


def start(environment: Mapping[str, str] = os.environ) -> None:
    """Tells the launcher of this rank, and watches from here on, where nobody else hears SIGTERM.

    It does nothing where the launcher cannot be asked.

    Args:
        environment: the variables in which the launcher says how many ranks there are, and where it is.
    """
    global _watch
    arrivals = Arrivals(environment, imported=True)
    # An import does not fail because the launcher does not answer.
    with contextlib.suppress(OSError):
        # A program that a rank has started, such as a worker that reads data, is no rank.
        if not arrivals.are_known or not arrivals.enter_first():
            return
    if _is_main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and not _is_caught(signal.SIGTERM):
        _watch = _ImportWatch(arrivals, world_rank(environment))
        signal.signal(signal.SIGTERM, _watch.on_signal)
        _keep_from_children()


def stop() -> None:
    """Restores SIGTERM as it was. A handler that the script has set since stays."""
    global _watch
    # Python takes no handlers from other threads. The handler that is there says nothing from here on.
    if _watch is not None and _is_main_thread() and signal.getsignal(signal.SIGTERM) == _watch.on_signal:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _watch = None


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _is_caught(number: signal.Signals) -> bool:
    """Returns whether there is a handler that Python does not know, such as one of native code."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        caught = Path("/proc/self/status").read_text(encoding="utf-8").partition("SigCgt:")[2].split()[0]
        return bool(int(caught, 16) >> (number - 1) & 1)
    return False


@functools.cache
def _keep_from_children() -> None:
    """Lets forked children end by signals as usual.

    Python drops unhandled signals when it forks. So the signal of someone who ends a child at once would be lost.
    """
    forking = threading.local()

    def hold() -> None:
        forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM] if _watch else [])

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, forking.mask)

    def release_child() -> None:
        stop()
        release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=release_child)


class _ImportWatch:
    def __init__(self, arrivals: Arrivals, rank: int) -> None:
        self._arrivals, self._rank = arrivals, rank

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Says why, and ends the process as the signal by itself would."""
        signal.signal(number, signal.SIG_DFL)
        try:
            # A script may have kept the handler, to call it from its own.
            if _watch is self:
                line = f"smp_tf: rank {self._rank} (host {this_host()}) was ended by SIGTERM before smp.init"
                tell_in_time(f"{line}{self._arrivals.whose_end()}.")
        finally:
            # This happens whether there were words or not.
            os.kill(os.getpid(), number)
