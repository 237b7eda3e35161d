"""Notices that replicas average the gradients of different steps, or that one waits long for another.

    rank 0: in a step of `generator`, whose gradients it averages with rank 1      ──▶
    rank 1: in a step of `discriminator`, whose gradients it averages with rank 0  ──▶ neither will ever end

Replicas wait for each other in Horovod, not for a message, so who waits in messages (step_watch.py) does not show it.
What shows it is the step that the rank of the same stage is in: a step with gradients ends once all replicas have come
to it, so two that are in steps of different functions for long, and wait for no message there, never go on. One that
has begun fewer such steps than this rank, or does not answer, may only be late: that is told, once for each, and ends
all after `stall_timeout`. Of a rank in the same step it cannot be seen whether it computes or hangs there: when both
have been in it for that long, it is told, and nothing ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from smp_tf.announce import tell
from smp_tf.deadlock import SAME_STEPS, wait_in_words
from smp_tf.errors import RankMismatchError

if TYPE_CHECKING:
    from smp_tf.ops.transport import Transport

# Seconds in one step after which a rank asks its replicas; as long as messages are waited for without a word.
PATIENCE = 30.0
_ANSWER_TIME = 1.0
# A busy host may keep a rank from answering once.
_SILENCE = 5.0

#: Programs that average gradients, by number: what their step function is known by.
_averaging: dict[int, str] = {}
#: Those among them whose number means the same program on every replica.
_everywhere: set[int] = set()


def know_program(number: int, function: str, *, everywhere: bool) -> None:
    """Say that a program gives gradients, which replicas average.

    Args:
        number: of the program.
        function: what its step function is known by, on all ranks.
        everywhere: whether all replicas have agreed on the number; else another program may bear it on others.
    """
    _averaging[number] = function
    if everywhere:
        _everywhere.add(number)


class ReplicaWatch:
    """Looks, when asked to, whether this rank's step waits for replicas that do something else.

    Args:
        transport: how other ranks are asked.
        others: world ranks that hold the same stage of other replicas.
        describe: names a rank for messages.
        named: names a program for messages.
        stall_timeout: seconds that a rank may keep the others waiting.
        patience: seconds in one step until the others are asked, if that is less.
        clock: tells the time in seconds.
    """

    def __init__(
        self,
        transport: Transport,
        others: Sequence[int],
        describe: Callable[[int], str],
        named: Callable[[int], str],
        stall_timeout: float,
        patience: float = PATIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._others = others
        self._describe = describe
        self._named = named
        self._stall_timeout = stall_timeout
        self._patience = min(patience, stall_timeout)
        self._clock = clock
        self._suspects: dict[int, tuple[Any, ...]] = {}
        self._silent_since: dict[int, float] = {}
        self._told: set[int] = set()

    def look(self) -> None:
        """Ask the replicas, if this rank has been in a step with gradients for long; cheap otherwise.

        Raises:
            RankMismatchError: one of them is in a step of another function with gradients, as it was the last time;
                or it has kept this rank waiting for `stall_timeout`.
        """
        own = self._transport.ask(self._transport.rank) if self._others else None
        if own is None or not self._may_average(own):
            self._suspects.clear()
            self._silent_since.clear()
            return
        for rank in self._others:
            self._look_at(rank, own)

    def _look_at(self, rank: int, own: dict[str, Any]) -> None:
        status = self._transport.ask(rank, _ANSWER_TIME)
        if status is None:
            self._suspects.pop(rank, None)
            self._hear_nothing(rank, own)
            return
        self._silent_since.pop(rank, None)
        step, place = (own["program"], own["step"]), (status["program"], status["step"])
        function = _averaging[own["program"]]
        their = _averaging.get(status["program"]) if status["program"] in _everywhere else None
        if their not in (None, function) and self._may_average(status):
            # Seen twice, so that its end was not on its way to us when it was seen.
            if self._suspects.get(rank) == (step, place):
                raise RankMismatchError(f"{self._here(own)}, while {self._there(rank, status)}. {_ADVICE} {SAME_STEPS}")
            self._suspects[rank] = step, place
            return
        self._suspects.pop(rank, None)
        there = self._there(rank, status)
        if status["averages"] < own["averages"]:
            self._wait(own, there, is_late=own["step_seconds"] > self._stall_timeout)
        elif status["in_step"] and min(own["step_seconds"], status["step_seconds"]) > self._stall_timeout:
            self._tell(own, f"{there}: it computes, or hangs there. The job goes on")

    def _hear_nothing(self, rank: int, own: dict[str, Any]) -> None:
        if self._transport.await_goodbyes([rank], 0.0):
            self._silent_since.pop(rank, None)
            return  # it has left or is lost, which the transport knows
        now = self._clock()
        seconds = now - self._silent_since.setdefault(rank, now)
        if seconds > _SILENCE:
            why = "its process is stopped, out of reach, or has no processor time"
            self._wait(own, f"{self._describe(rank)} does not answer: {why}", is_late=seconds > self._stall_timeout)

    def _wait(self, own: dict[str, Any], there: str, *, is_late: bool) -> None:
        """Tell once that another rank is elsewhere, or end because it has been for too long.

        Args:
            own: what this rank does.
            there: what the other rank does, in words.
            is_late: whether it has kept this rank waiting for `stall_timeout`.
        """
        limit = f"stall_timeout = {self._stall_timeout:g} s"
        if is_late:
            raise RankMismatchError(
                f"{self._us(own)} gave up in step {own['step']} of {self._named(own['program'])} after {limit}: its "
                f"gradients wait for those of other replicas, and {there}. {_MORE_TIME}"
            )
        self._tell(own, f"{there}. The job goes on; it ends after {limit}")

    def _tell(self, own: dict[str, Any], there: str) -> None:
        if own["program"] not in self._told:
            self._told.add(own["program"])
            tell(f"smp_tf: {self._here(own)}; {there}.")

    def _may_average(self, status: dict[str, Any]) -> bool:
        """Whether a rank may wait for its replicas: it has been in a step for long, and waits for no message of it."""
        waits = any(wait["program"] == status["program"] for wait in status["waits"])
        is_long = status["step_seconds"] > self._patience
        return status["in_step"] and is_long and status["program"] in _averaging and not waits

    def _us(self, own: dict[str, Any]) -> str:
        us = self._describe(own["rank"])
        return f"{us[:1].upper()}{us[1:]}"

    def _here(self, own: dict[str, Any]) -> str:
        return (
            f"{self._us(own)} has been in step {own['step']} of {self._named(own['program'])} for "
            f"{own['step_seconds']:.0f} s and waits for no message: it computes, or its gradients wait for those of "
            f"other replicas"
        )

    def _there(self, rank: int, status: dict[str, Any]) -> str:
        """What another rank does, after "while"."""
        who, seconds = self._describe(rank), f"{status['step_seconds']:.0f} s"
        doing = f", doing '{status['activity']}'" if status["activity"] else ""
        if status["step"] < 0:
            return f"{who} has begun no step yet, {seconds} after its start{doing}"
        if not status["in_step"]:
            return f"{who} ended its step {status['step']} {seconds} ago{doing}"
        # A number that not all have agreed on may stand for another program there.
        known = status["program"] in _everywhere
        of = f"of {self._named(status['program'])}" if known else "of a program that this rank does not know"
        waits = "".join(f" and {wait_in_words(wait, self._describe(wait['peer']))}" for wait in status["waits"][:1])
        return f"{who} has been in step {status['step']} {of} for {seconds}{waits}"


_MORE_TIME = (
    "All replicas must come to every step that gives gradients; a rank that only needs longer gets it with a larger "
    "stall_timeout."
)
_ADVICE = (
    "Each averages gradients with the other, of different steps, so neither can end: all replicas must call the steps "
    "that give gradients in the same order."
)
