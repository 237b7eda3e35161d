"""Lets a rank that its launcher ends between `import smp_tf` and `smp.init` say whose process had ended.

    import smp_tf ──▶ a handler of SIGTERM, and a thread ──▶ smp.init: StartWatch hears it from here on
                              │
                              ▼
       "rank 0 (host a) was ended by SIGTERM before smp.init: rank 1 (host a, pid 7) had ended."

Python calls handlers between two steps of the main thread, which may be in native code for long: in Horovod, which the
script starts, or in TensorFlow. So a thread hears of the signal, too, and whichever comes first acts on it.

Before the import no code of smp_tf runs: a script that imports TensorFlow first is ended there without a word. So is
one that is in native code which keeps Python's lock for seconds, when the launcher kills it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

# Imported already, and with it what finds the words: a handler may run in the midst of another import.
from smp_tf.arrivals import Arrivals, this_host
from smp_tf.environment import world_rank

_NOBODY = -1
_libc = ctypes.CDLL(None)
_libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
_libc.signal.restype = ctypes.c_void_p
_watch: _ImportWatch | None = None


def start(environment: Mapping[str, str] = os.environ) -> None:
    """Tells the launcher of this rank and watches from here on, where nobody else hears SIGTERM.

    Does nothing where the launcher cannot be asked.

    Args:
        environment: where the launcher says how many ranks there are, and where it is.
    """
    global _watch
    arrivals = Arrivals(environment, imported=True)
    # An import does not fail for want of somebody to tell.
    with contextlib.suppress(OSError):
        # A program that a rank has started, such as a worker that reads data, is no rank.
        if not arrivals.are_known or not arrivals.enter_first():
            return
    if _is_main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and not _is_caught(signal.SIGTERM):
        _watch = _ImportWatch(arrivals, world_rank(environment))
        signal.signal(signal.SIGTERM, _watch.on_signal)
        _watch.listen()
        _keep_from_children()


def stop() -> None:
    """Leaves SIGTERM as it was; a handler that the script has put there since stays."""
    global _watch
    # Of other threads Python takes no handlers; what is there says nothing from here on.
    if _watch is not None and _is_main_thread():
        if signal.getsignal(signal.SIGTERM) == _watch.on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _watch.listen_no_more()
    _watch = None


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _is_caught(number: signal.Signals) -> bool:
    """Whether there is a handler, of native code's too, of which Python does not know."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        caught = Path("/proc/self/status").read_text(encoding="utf-8").partition("SigCgt:")[2].split()[0]
        return bool(int(caught, 16) >> (number - 1) & 1)
    return False


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
        # The main thread may hear it a second time in the midst of the first.
        self._acting = threading.RLock()
        self._wakes: int | None = None

    def listen(self) -> None:
        """Hears the signal in a thread as well, unless the script has Python tell of signals elsewhere."""
        heard, wakes = os.pipe()
        os.set_blocking(wakes, False)
        others = signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        if others != _NOBODY:
            signal.set_wakeup_fd(others)
            os.close(heard)
            os.close(wakes)
            return
        self._wakes = wakes
        threading.Thread(target=self._listen, args=[heard], name="smp_tf import watch", daemon=True).start()

    def listen_no_more(self) -> None:
        """Ends the thread."""
        if self._wakes is not None:
            others = signal.set_wakeup_fd(_NOBODY)
            if others != self._wakes:
                signal.set_wakeup_fd(others)
            os.close(self._wakes)
            self._wakes = None

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Says it, and ends the process as the signal does by itself; once."""
        # Another such signal ends it at once. Of Python's handlers the main thread alone disposes.
        _libc.signal(number, None)
        # Who comes second waits here for the end.
        with self._acting:
            try:
                # A script may have kept it, to call it from a handler of its own.
                if _watch is self:
                    line = f"smp_tf: rank {self._rank} (host {this_host()}) was ended by SIGTERM before smp.init"
                    # Past Python's stream, in whose midst the handler may run.
                    os.write(2, f"{line}{self._arrivals.whose_end()}.\n".encode())
            finally:
                # Whether there were words or not.
                os.kill(os.getpid(), number)

    def _listen(self, heard: int) -> None:
        # At the end of what it hears nobody wakes it any more.
        while numbers := os.read(heard, 64):
            # Of signals that the script has handlers for, too, which are its own.
            if signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) == self.on_signal:
                self.on_signal(signal.SIGTERM, None)
        os.close(heard)
