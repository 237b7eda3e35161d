"""Lets a rank that its launcher ends between `import smp_tf` and `smp.init` say whose process had ended.

    import smp_tf ──▶ a handler of SIGTERM ──▶ smp.init: StartWatch hears it from here on
                              │
                              ▼
       "rank 0 (host a) was ended by SIGTERM before smp.init: rank 1 (host a, pid 7) had ended."

Before the import no code of smp_tf runs: a script that imports TensorFlow first is ended there without a word.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Mapping
from types import FrameType

# Imported already, and with it what finds the words: a handler may run in the midst of another import.
from smp_tf.arrivals import Arrivals, this_host
from smp_tf.environment import world_rank

_watch: _ImportWatch | None = None


def start(environment: Mapping[str, str] = os.environ) -> None:
    """Watches from here on, where the launcher is one that can be asked and nobody else hears SIGTERM.

    Args:
        environment: where the launcher says how many ranks there are, and where it is.
    """
    global _watch
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return
    arrivals = Arrivals(environment, imported=True)
    # A program that a rank has started, such as a worker that reads data, is no rank.
    if arrivals.are_known and arrivals.enter_first():
        _watch = _ImportWatch(arrivals, world_rank(environment))
        signal.signal(signal.SIGTERM, _watch.on_signal)
        _keep_from_children()


def stop() -> None:
    """Leaves SIGTERM as it was; a handler that the script has put there since stays."""
    global _watch
    if _watch is not None and signal.getsignal(signal.SIGTERM) == _watch.on_signal:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _watch = None


@functools.cache
def _keep_from_children() -> None:
    """Children that are forked end as signals say.

    Python drops what it has not handled when it forks, so that the signal of who ends a child at once was lost.
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
        """Says it, and ends the process as the signal does by itself."""
        signal.signal(number, signal.SIG_DFL)
        line = f"smp_tf: rank {self._rank} (host {this_host()}) was ended by SIGTERM before smp.init"
        with contextlib.suppress(OSError):
            # Past Python's stream, in whose midst the handler may run.
            os.write(2, f"{line}{self._arrivals.whose_end()}.\n".encode())
        os.kill(os.getpid(), number)
