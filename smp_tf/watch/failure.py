"""Ends all ranks when an exception ends one of them, and states that exception as the cause.

exception nobody catches ──▶ its traceback, as always ──▶ abort: every rank prints the cause
exception that only follows from another rank's end ──▶ its traceback ──▶ the true cause, last

The cause should be told once and last. So the transport holds its line for a moment, in which a traceback is printed. A
traceback that comes later, or after a signal that ends the process, stands after the line.
"""

from __future__ import annotations

import os
import re
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from smp_tf.errors import RankMismatchError
from smp_tf.watch.exception_hooks import ExceptionHooks, chain_of

if TYPE_CHECKING:
    from smp_tf.ops.transport import Transport

# The errors of Horovod and TensorFlow after the end of another rank. They do not say the cause.
_FOLLOW_UPS = ("Horovod has been shut down", "HorovodInternalError", "horovod_shutdown")
# Seconds that a rank waits for the cause when it learns of another's end through Horovod.
_CAUSE_TIME = 3.0
_TELL_TIME = 2.0
# Seconds to wait for the main thread. If it is in native code for longer, its traceback comes after the cause.
_TRACEBACK_TIME = 1.5
_LONGEST_MESSAGE = 1500
_LINES_OF_TRACEBACK = 3
# The begin of an error of an op in a graph. After it come the lines of the script that made the op.
_IN_A_GRAPH = "Graph execution error:"
_LINES_OF_CODE = re.compile(
    r'^Detected at node .* defined at \(most recent call last\):\n(?:<stack traces unavailable>\n)?|^ +File ".*\n+',
    re.M,
)
# A tf.debugging.Assert of this library, in one line. The values that it shows are in brackets.
_CHECK = re.compile(r"assertion failed: \[smp_tf: (.+?)\] \[\[\{\{node ")


class FailureHooks:
    """Tells all ranks about an exception that ends this one.

    Args:
        transport: Where failures are told.
        who: This rank in words, such as "rank 1 (host a, pid 7, stage 1 of replica 0)".
    """

    def __init__(self, transport: Transport, who: str) -> None:
        self.failed = False
        self._transport = transport
        self._who = who
        self._process = os.getpid()
        self._hooks = ExceptionHooks(self._tell)

    def install(self) -> None:
        """Puts the hooks before those that are there."""
        self._transport.hold_words(_TRACEBACK_TIME)
        self._hooks.install()

    def end_all(self, error: Exception) -> None:
        """Tells all ranks of an error that is caught here, since no hook would hear of it, and ends this rank.

        Args:
            error: the error, which is told here in its own words.
        """
        self.failed = True
        self._transport.hold_words(0.0)
        words = f"{self._who} ends the job: {_cut(' '.join(str(error).split()))}"
        if self._transport.cause is None:
            self._transport.abort(words, exit_code=1, timeout=_TELL_TIME, type=type(error).__name__, traceback=[])

    def remove(self) -> None:
        """Puts back the earlier hooks, unless somebody has put another hook before these since."""
        self._transport.hold_words(0.0)
        self._hooks.remove()

    def _tell(self, error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != self._process:
            return  # a child that the script forked is no rank and has no transport
        if not self._transport.is_open:
            return  # Python has nearly ended, but a thread of the script has not
        self.failed = True
        if follows_from_another(error):
            _wait_until(lambda: self._transport.cause is not None, _CAUSE_TIME)
        # From here on the line is printed, after the traceback, because the last line is the one that is read.
        self._transport.hold_words(0.0)
        if self._transport.cause is not None:
            return
        stopped = isinstance(error, KeyboardInterrupt)
        self._transport.abort(
            describe(error, trace, self._who),
            exit_code=130 if stopped else 1,
            timeout=_TELL_TIME,
            type=type(error).__name__,
            traceback=_last_lines(trace),
        )


def follows_from_another(error: BaseException) -> bool:
    """Returns whether an exception only says that another rank has ended, as Horovod does."""
    told = (f"{type(seen).__name__}: {seen}" for seen in chain_of(error))
    return any(words in text for text in told for words in _FOLLOW_UPS)


def describe(error: BaseException, trace: TracebackType | None, who: str) -> str:
    """Returns the cause in one line.

    Args:
        error: What ended this rank.
        trace: Its traceback.
        who: This rank in words.

    Returns:
        Who failed, with which exception, and where in the code.
    """
    if isinstance(error, KeyboardInterrupt):
        return f"{who} was ended by Ctrl-C"
    what = " ".join(type_and_words(error).split())
    check = _CHECK.search(what)
    if check:
        # The error says which ranks differ. This rank only looked.
        return f"{who} ends the job: " + _cut(check[1].replace("] [", " ").replace("\\'", "'"))
    if isinstance(error, RankMismatchError):
        # The error names the ranks that differ. The rank that happened to end first is not to blame.
        return _cut(what.removeprefix(f"{type(error).__name__}: "))
    lines = _last_lines(trace)
    return f"{who} failed: {_cut(what)}" + (f" (at {lines[-1]})" if lines else "")


def type_and_words(error: BaseException) -> str:
    """Returns an error's type and message, without the code lines that TensorFlow puts before the message.

    Args:
        error: the error.
    """
    # TensorFlow replaces an error that is raised while a tf.function is traced by another one.
    metadata = getattr(error, "ag_error_metadata", None)
    if metadata is not None:
        return str(metadata.cause_message)
    text = str(error)
    if text.startswith(_IN_A_GRAPH):
        text = _LINES_OF_CODE.sub("", text.removeprefix(_IN_A_GRAPH)).strip()
    return f"{type(error).__name__}: {text}" if text.strip() else type(error).__name__


def _last_lines(trace: TracebackType | None) -> list[str]:
    frames = [f for f in traceback.extract_tb(trace) if not f.filename.startswith("<frozen ")]
    return [f"{f.filename}:{f.lineno} in {f.name}" for f in frames[-_LINES_OF_TRACEBACK:]]


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]}..."


def _wait_until(happened: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not happened() and time.monotonic() < deadline:
        pause.wait(0.02)
