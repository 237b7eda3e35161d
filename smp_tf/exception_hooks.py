"""Says when Python has printed the traceback of an exception that nobody catches."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType


class ExceptionHooks:
    """Goes behind the hooks that print tracebacks, of the main thread and of others.

    Args:
        printed: is given an exception, and its traceback, once that is printed; not that which ends a thread in order.
    """

    def __init__(self, printed: Callable[[BaseException, TracebackType | None], object]) -> None:
        self._printed = printed

    def install(self) -> None:
        """Puts the hooks in front of those that are there, which they call first."""
        self._previous = sys.excepthook
        self._previous_in_thread = threading.excepthook
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception

    def remove(self) -> None:
        """Puts back what was there, unless somebody has put another hook in front since."""
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._previous
        if threading.excepthook == self._on_thread_exception:
            threading.excepthook = self._previous_in_thread

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._previous(kind, error, trace)
        self._tell(error, trace)

    def _on_thread_exception(self, args: threading.ExceptHookArgs) -> None:
        self._previous_in_thread(args)
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            self._tell(args.exc_value, args.exc_traceback)

    def _tell(self, error: BaseException, trace: TracebackType | None) -> None:
        for stream in (sys.stdout, sys.stderr):
            # A script may have closed it, or have none.
            with contextlib.suppress(AttributeError, OSError, ValueError):
                stream.flush()
        self._printed(error, trace)


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """The exceptions that are printed in one traceback, the last first."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
