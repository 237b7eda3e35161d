"""Notices that ranks wait for each other at different places, without an end.

    rank 1: waits in an exchange for rank 0 ──────────────▶ rank 0: in a step, and waits for a
            (about to run another step)     ◀──────────────         message of that step from rank 1

A rank in an exchange is in no step, so it sends nothing of any step until the exchange ends. If a rank that the
exchange needs waits for such a message, neither will ever go on. That is an error. A rank that only needs long, for a
save or at a breakpoint, waits for no message, and nothing is said here.

The transport counts a step as ended when its last op has run. A step that has failed on this rank never gets there.
When the main thread begins an exchange in it, it has left the step by an error that was caught.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from smp_tf.errors import RankMismatchError
from smp_tf.ops.transport import MESSAGE_PROGRAM, REPLICA_PROGRAMS

if TYPE_CHECKING:
    from smp_tf.ops.transport import Transport

# Seconds in an exchange until the others are asked, and seconds between two rounds of questions.
PATIENCE = 5.0
INTERVAL = 2.0
# Seconds after which a missing message cannot just be on its way.
STUCK = 5.0
_ANSWER_TIME = 1.0
# The transport's words for the wait in smp.recv_from and similar calls.
OBJECT = "an object"
# Its words for the waits of threads that save in the background. The main thread goes on meanwhile, so nothing follows
# from them.
IN_BACKGROUND = "the other ranks' parts of a save in the background"
SAME_MESSAGES = (
    "Each smp.send and smp.broadcast needs an smp.recv_from on every rank it goes to, and smp.allgather and barriers "
    "are called by all ranks of their group; order these calls so that a rank never waits for one that waits for it. A "
    "message above some thousand bytes leaves smp.send only when it is received."
)
CAUGHT = (
    "An error of a step that one rank catches leaves the others in that step: let it end the job, or keep it from "
    "happening."
)
SAME_STEPS = (
    "Every rank must call the same steps in the same order, and the ranks of a replica with batches of the same shapes."
)


class DeadlockWatch:
    """Asks the other ranks of an exchange what they wait for, while this rank waits for them.

    Args:
        transport: How they are asked.
        others: World ranks of the exchange, without this one.
        doing: What this rank is doing, after "rank 1 is".
        describe: Names a rank for messages.
        patience: Seconds until they are asked for the first time.
        interval: Seconds between two rounds of questions.
        stuck: Seconds after which a message that has not come is not merely on its way.
    """

    def __init__(
        self,
        transport: Transport,
        others: Sequence[int],
        doing: str,
        describe: Callable[[int], str],
        patience: float = PATIENCE,
        interval: float = INTERVAL,
        stuck: float = STUCK,
    ) -> None:
        self._transport = transport
        self._others = others
        self._doing = doing
        self._describe = describe
        self._interval = interval
        self._stuck = stuck
        self._next = time.monotonic() + patience
        self._suspects: dict[int, tuple[Any, ...]] = {}

    def look(self) -> None:
        """Asks the others, if it is time to. Otherwise it is cheap.

        Raises:
            RankMismatchError: One of the others waits for a message that this rank will never send.
        """
        if time.monotonic() < self._next:
            return
        own = self._transport.ask(self._transport.rank)
        in_main_thread = threading.current_thread() is threading.main_thread()
        if own is not None and (in_main_thread or not own["in_step"]):
            for rank in self._others:
                self._look_at(rank, caught=own["in_step"])
        self._next = time.monotonic() + self._interval

    def _look_at(self, rank: int, caught: bool) -> None:
        status = self._transport.ask(rank, _ANSWER_TIME)
        wait = None if status is None else self._wait_for_us(status)
        if status is None or wait is None:
            self._suspects.pop(rank, None)
            return
        # It must be seen twice. The first time, the end of this exchange may have been on its way to us.
        seen = (wait["program"], wait["step"], wait["microbatch"], wait["label"])
        if self._suspects.get(rank) != seen:
            self._suspects[rank] = seen
            return
        us = self._describe(self._transport.rank)
        raise RankMismatchError(
            f"{us[:1].upper()}{us[1:]} is {self._doing}, while {self._describe(rank)} is in step {status['step']} and "
            f"{wait_in_words(wait, us)}. {CAUGHT if caught else SAME_STEPS}"
        )

    def _wait_for_us(self, status: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the message from this rank that the step of another rank has waited for long, if there is one."""
        waits = (wait for wait in stuck_waits(status, self._stuck) if wait["peer"] == self._transport.rank)
        return next(waits, None)


def stuck_waits(status: dict[str, Any], stuck: float) -> list[dict[str, Any]]:
    """Returns the messages of its step that a rank has waited for too long; none outside a step.

    Args:
        status: what the rank answered to `Transport.ask`.
        stuck: seconds after which a message is not merely on its way.
    """
    if not status["in_step"]:
        return []
    waits = (w for w in status["waits"] if w["program"] == status["program"] or w["program"] in REPLICA_PROGRAMS)
    return [w for w in waits if w["seconds"] > stuck]


def stuck_messages(status: dict[str, Any], stuck: float) -> list[dict[str, Any]]:
    """Returns the messages outside steps that a rank's script has waited for too long; none if it is in no such call.

    Args:
        status: what the rank answered to `Transport.ask`.
        stuck: seconds after which a message is not merely on its way.
    """
    if status["in_step"] or not status["activity"] or status["activity_seconds"] <= stuck:
        return []
    waits = (w for w in status["waits"] if w["program"] == MESSAGE_PROGRAM and w["label"] != IN_BACKGROUND)
    return [w for w in waits if w["seconds"] > stuck]


def wait_in_words(wait: dict[str, Any], peer: str) -> str:
    """Returns what a rank waits for, after "rank 1 is in step 7 and"."""
    if wait["program"] == MESSAGE_PROGRAM:
        return (
            f"waits until {peer} takes {wait['label']}" if wait["is_send"] else f"waits for {wait['label']} of {peer}"
        )
    if wait["is_send"]:
        return f"waits until {peer} takes {wait['label']!r}"
    return f"waits for {wait['label']!r} from {peer}"
