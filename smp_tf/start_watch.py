"""Says in `smp.init` which ranks are waited for, and ends a start that waits longer than `stall_timeout` for them.

Until the transport is connected ranks meet in Horovod, which does not say whom it waits for, and cannot be interrupted.
When a rank ends there, the launcher sends SIGTERM to the others, which say who it was before they end.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from smp_tf.announce import tell
from smp_tf.arrivals import Arrivals, this_host
from smp_tf.environment import world_rank, world_size
from smp_tf.ops.transport import wait_to_terminate

# As long as messages are waited for without a word.
PATIENCE = 30.0
_AWAITED = "other ranks"


class StartWatch:
    """Watches over a start of several ranks, within `with`.

    Args:
        stall_timeout: seconds that a rank may keep the others waiting.
        environment: where the launcher says how many ranks there are, and where it is.
        patience: seconds until it is said who is waited for.
        end: ends the process, with an exit code.

    Attributes:
        arrivals: who has come to this start.
    """

    def __init__(
        self,
        stall_timeout: float,
        environment: Mapping[str, str] = os.environ,
        patience: float = PATIENCE,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._stall_timeout = stall_timeout
        self._rank, self._size = world_rank(environment), world_size(environment)
        self._patience = min(patience, stall_timeout)
        self._end = end
        self._awaited: Callable[[], str] = lambda: _AWAITED
        #: When what is waited for now began: another beginning is a sign of life.
        self._begun = time.monotonic()
        self._over = threading.Event()
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="smp_tf start watch", daemon=True)
        # The two ends of a pipe: numbers of signals, and 0 when it is over.
        self._heard = self._to_hear = -1
        self._listens = False
        self.arrivals = Arrivals(environment)

    def __enter__(self) -> StartWatch:
        if self._size > 1:
            self._heard, self._to_hear = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._listen()
            self.arrivals.enter()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A start that has come to its end is not ended any more.
        with self._ending:
            self._over.set()
        if self._size > 1:
            os.write(self._to_hear, bytes([0]))
            self._thread.join()
            self.stop_listening()
            os.close(self._heard)
            os.close(self._to_hear)

    def _listen(self) -> None:
        """Has the thread end this process at SIGTERM, unless the script has a way of its own to end."""
        is_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if threading.current_thread() is not threading.main_thread() or not is_default:
            return
        # The main thread may be in Horovod: Python's handler would run when it comes back, which may be never.
        before = signal.set_wakeup_fd(self._to_hear, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            return
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        self._listens = True

    def stop_listening(self) -> None:
        """Leaves SIGTERM to others from now on."""
        if self._listens:
            self._listens = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            wait_to_terminate(False)

    def await_others(self, awaited: Callable[[], str] = lambda: _AWAITED) -> None:
        """Say what is waited for from now on.

        Args:
            awaited: Gives the words after "has waited 30 s in smp.init for".
        """
        self._awaited = awaited
        self._begun = time.monotonic()

    def meet_in_horovod(self) -> None:
        """Say that ranks meet in Horovod from now on."""
        if self._listens:
            # Its thread may hear of the end of a rank before the launcher does.
            wait_to_terminate(True)
        self.await_others(self.arrivals.missing_in_words)

    def _run(self) -> None:
        told_of = -1.0
        while True:
            begun = self._begun
            until = self._stall_timeout if told_of == begun else self._patience
            if self._wait(begun + until - time.monotonic()):
                return
            if self._begun != begun:
                continue
            words = self._awaited()
            if told_of != begun:
                told_of = begun
                if not self._over.is_set():
                    tell(
                        f"smp_tf: rank {self._rank} has waited {time.monotonic() - begun:.0f} s in smp.init for "
                        f"{words}. The job goes on; it ends after stall_timeout = {self._stall_timeout:g} s."
                    )
                continue
            with self._ending:
                if self._over.is_set() or self._begun != begun:
                    continue
                tell(
                    f"smp_tf: rank {self._rank} gave up in smp.init after stall_timeout = {self._stall_timeout:g} s: "
                    f"it waited for {words}. Every rank must call smp.init; a rank that only needs longer until then "
                    f"gets it with a larger stall_timeout."
                )
                # The main thread is in Horovod, and does not come back from there.
                self._end(1)
                return

    def _wait(self, seconds: float) -> bool:
        """Waits until the start is over, which it returns, or for some seconds; a signal ends the process."""
        select.select([self._heard], [], [], max(0.0, seconds))
        with contextlib.suppress(BlockingIOError):
            if signal.SIGTERM in os.read(self._heard, 512):
                with self._ending:
                    lost = " and ".join(self.arrivals.lost())
                    why = f"{lost} ended there" if lost else f"it waited for {self._awaited()}"
                    tell(f"smp_tf: rank {self._rank} (host {this_host()}) was ended by SIGTERM in smp.init: {why}.")
                    self._end(128 + signal.SIGTERM)
                return True
        return self._over.is_set()
