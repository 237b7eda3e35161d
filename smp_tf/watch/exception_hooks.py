"""Says when Python has printed the traceback of an exception that nobody catches, or when nobody reads it."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType

from smp_tf.announce import has_room

OnException = Callable[[BaseException, TracebackType | None], object]

# A traceback that takes longer is written to somebody who does not read it, such as a pager or a terminal after Ctrl-S.
_PRINTING_TIME = 3.0


class ExceptionHooks:
    """Runs after the hooks that print tracebacks, for the main thread and for others.

    Args:
        printed: takes an exception and its traceback once that is printed, but not an exception that ends a thread in
            order.
        unread: takes them instead, in another thread, when standard error or output has had no room for seconds of
            printing; by default it is `printed`. A hook that only takes long, such as a debugger, is waited for.
    """

    def __init__(self, printed: OnException, unread: OnException | None = None) -> None:
        self._printed = printed
        self._unread = unread or printed

    def install(self) -> None:
        """Puts the hooks before those that are there. They call these first."""
        self._previous = sys.excepthook
        self._previous_in_thread = threading.excepthook
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception

    def remove(self) -> None:
        """Puts back the earlier hooks, unless somebody has put another hook before these since."""
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._previous
        if threading.excepthook == self._on_thread_exception:
            threading.excepthook = self._previous_in_thread

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with self._telling(error, trace):
            self._previous(kind, error, trace)

    def _on_thread_exception(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_value is None or isinstance(args.exc_value, SystemExit):
            self._previous_in_thread(args)
            return
        with self._telling(args.exc_value, args.exc_traceback):
            self._previous_in_thread(args)

    @contextlib.contextmanager
    def _telling(self, error: BaseException, trace: TracebackType | None) -> Iterator[None]:
        """Tells of an exception after the printing within `with`, or once that takes too long."""
        telling = threading.Lock()
        is_told = False

        def tell(hear: OnException) -> None:
            nonlocal is_told
            # The second one goes on when the exception has been told.
            with telling:
                if not is_told:
                    is_told = True
                    hear(error, trace)

        is_over = threading.Event()

        def look() -> None:
            while not is_over.wait(_PRINTING_TIME):
                if not (has_room(sys.stderr) and has_room(sys.stdout)):
                    tell(self._unread)
                    return

        # When Python has nearly ended, it starts no threads.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=look, name="smp_tf traceback", daemon=True).start()
        try:
            yield
            for stream in (sys.stdout, sys.stderr):
                # A script may have closed it, or have none.
                with contextlib.suppress(AttributeError, OSError, ValueError):
                    stream.flush()
        finally:
            is_over.set()
            tell(self._printed)


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yields the exceptions that are printed in one traceback, the last first."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
