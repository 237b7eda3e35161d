"""Says in `smp.init` which ranks the start waits for, and ends a start that waits longer than `stall_timeout`.

Until the transport is connected, ranks meet in Horovod, which does not say whom it waits for and cannot be interrupted.
When a rank ends there, the launcher sends SIGTERM to the others. They say which rank it was before they end. A rank
that hears of it through Horovod has an error to print, while the same signal is on its way:

    PeerError ──▶ traceback ──▶ the start is left, the error has told the cause
        └──────▶ SIGTERM before that ──▶ "rank 0 (host a) was ended by SIGTERM in smp.init: Rank 1 ended while ..."
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from smp_tf.announce import tell_in_time
from smp_tf.ops.errors import LibraryError, PeerError
from smp_tf.ops.start_guard import StartGuard
from smp_tf.start import import_watch
from smp_tf.start.arrivals import Arrivals, this_host
from smp_tf.start.environment import world_rank, world_size
from smp_tf.watch.exception_hooks import ExceptionHooks, chain_of

# Seconds of waiting until something is said, as for messages.
PATIENCE = 30.0
_AWAITED = "other ranks"
# The longest single wait, since clocks and locks cannot wait for years. After it the wait begins anew.
_LONGEST_WAIT = 3600.0
# Seconds for the traceback of a start's error. The launcher's signal takes less. A script that catches the error may go
# on.
_PRINTING_TIME = 2.0
_unprinted: _Unprinted | None = None


class StartWatch:
    """Watches over a start of several ranks, within its context.

    Args:
        stall_timeout: seconds that a rank may keep the others waiting.
        environment: the variables in which the launcher says how many ranks there are, and where it is.
        patience: seconds until it says whom the start waits for.
        end: ends the process, with an exit code.

    Attributes:
        arrivals: knows who has come to this start.
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
        #: When the current wait began. A new wait is a sign of life.
        self._begun = time.monotonic()
        self._over = threading.Event()
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="smp_tf start watch", daemon=True)
        self._guard: StartGuard | None = None
        # A closed guard, to be freed once the thread is done with it.
        self._left: StartGuard | None = None
        self.arrivals = Arrivals(environment)

    def __enter__(self) -> StartWatch:
        if self._size > 1:
            if (before := _unprinted) is not None:
                before.leave()
            import_watch.stop()
            # This comes before the others can see that this rank has come.
            self._guard = self._new_guard()
            try:
                self.arrivals.enter()
                self._thread.start()
            except BaseException:
                self.leave_signals()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A start that is complete is not ended any more.
        with self._ending:
            self._over.set()
        if self._size > 1 and error is not None and not isinstance(error, PeerError):
            # Before this process has ended, the others hear of the end of Horovod, but of no name.
            self.arrivals.fail()
            _end_if_unread(error, self._end)
        if isinstance(error, PeerError) and self._guard is not None:
            # The launcher's signal is on its way, and may come before Python has printed the error.
            self._guard.say(f": {str(error).removesuffix('.')}")
            _Unprinted(error, self._leave)
            return
        if isinstance(error, PeerError) and self._left is None:
            # As above, and nobody hears it.
            tell_in_time(f"smp_tf: rank {self._rank} (host {this_host()}) ends in smp.init: {error}")
        self._leave()

    def _leave(self) -> None:
        self.leave_signals()
        if self._thread.is_alive():
            self._thread.join()
        if self._left is not None:
            self._left.free()
            self._left = None

    def _new_guard(self) -> StartGuard | None:
        # Under other launchers it would have nothing to say, and Open MPI's may bring a UCX of its own.
        if not self.arrivals.are_known:
            return None
        try:
            return StartGuard(f"rank {self._rank} (host {this_host()})")
        except (LibraryError, OSError):
            # What is wrong with the environment is told in its order, and the library is opened again.
            return None

    @property
    def hears_signals(self) -> bool:
        """Returns whether this watch hears a signal that ends the process; else others hear it."""
        return self._guard is not None

    def leave_signals(self) -> None:
        """Leaves signals, and exceptions that Horovod's thread does not catch, to others from now on."""
        if self._guard is not None:
            self._left, self._guard = self._guard, None
            self._left.close()

    def await_others(self, awaited: Callable[[], str] = lambda: _AWAITED) -> None:
        """Notes what the start waits for from now on.

        Args:
            awaited: Returns the words after "has waited 30 s in smp.init for".
        """
        self._awaited = awaited
        self._begun = time.monotonic()

    def await_those_missing(self) -> None:
        """Notes that Horovod starts now."""
        self.await_others(lambda: self.arrivals.missing_in_words() or _AWAITED)

    def _run(self) -> None:
        told_of = -1.0
        while True:
            begun = self._begun
            until = self._stall_timeout if told_of == begun else self._patience
            if self._wait(begun + until):
                return
            if self._begun != begun:
                continue
            words = self._words_for_those_awaited()
            if told_of != begun:
                told_of = begun
                if not self._over.is_set():
                    tell_in_time(
                        f"smp_tf: rank {self._rank} has waited {time.monotonic() - begun:.0f} s in smp.init for "
                        f"{words}. The job goes on; it ends after stall_timeout = {self._stall_timeout:g} s."
                    )
                continue
            with self._ending:
                if self._over.is_set() or self._begun != begun:
                    continue
                tell_in_time(
                    f"smp_tf: rank {self._rank} gave up in smp.init after stall_timeout = {self._stall_timeout:g} s: "
                    f"it waited for {words}. Every rank must call smp.init; a rank that only needs longer until then "
                    f"gets it with a larger stall_timeout."
                )
                # The main thread is in Horovod and does not come back.
                self._end(1)
                return

    def _wait(self, until: float) -> bool:
        """Waits until the start is over, or until a time, and returns whether it is over. A signal ends the process."""
        while (left := min(until - time.monotonic(), _LONGEST_WAIT)) > 0.0 and not self._over.is_set():
            guard = self._guard
            if guard is None:
                # When all are connected, it goes on without one.
                self._over.wait(left)
            elif guard.wait(left):
                try:
                    words = self.arrivals.whose_end()
                except Exception as error:
                    words = f": whose end it is could not be found out ({error!r})"
                guard.say(words)
                return True
        return self._over.is_set()

    def _words_for_those_awaited(self) -> str:
        try:
            return self._awaited()
        except Exception as error:
            # This thread is the only one that ends a start which never would.
            return f"{_AWAITED}; which ones could not be found out ({error!r})"


def _end_if_unread(failure: BaseException, end: Callable[[int], object]) -> None:
    """Ends this process where nobody reads why its start has failed, since the others wait for it in Horovod.

    Args:
        failure: why the start has failed. A script that catches it goes on.
        end: ends the process, with an exit code.
    """

    def on_unread(error: BaseException, trace: TracebackType | None) -> None:
        if any(seen is failure for seen in chain_of(error)):
            end(1)

    ExceptionHooks(lambda *_: None, on_unread).install()


class _Unprinted:
    """Stays in a failed start until Python has printed why, but only for a moment.

    Args:
        error: why the start has failed.
        leave: leaves the start. It is called once.
    """

    def __init__(self, error: BaseException, leave: Callable[[], object]) -> None:
        global _unprinted
        _unprinted = self
        self._error = error
        self._leave: Callable[[], object] | None = leave
        # The second caller goes on when the start has been left. The main thread may call in the midst of that.
        self._leaving = threading.RLock()
        self._hooks = ExceptionHooks(self._on_printed)
        self._hooks.install()
        atexit.register(self.leave)
        self._timer = threading.Timer(_PRINTING_TIME, self.leave)
        self._timer.daemon = True
        self._timer.start()

    def leave(self) -> None:
        """Leaves the start, if nobody has done so."""
        global _unprinted
        with self._leaving:
            leave, self._leave = self._leave, None
            if leave is None:
                return
            self._timer.cancel()
            self._hooks.remove()
            atexit.unregister(self.leave)
            leave()
            if _unprinted is self:
                _unprinted = None

    def _on_printed(self, error: BaseException, trace: TracebackType | None) -> None:
        if any(printed is self._error for printed in chain_of(error)):
            self.leave()
