"""Notices that replicas average the gradients of different steps, or that one waits long for another.

    rank 0: in a step of `generator`, whose gradients it averages with rank 1      ──▶
    rank 1: in a step of `discriminator`, whose gradients it averages with rank 0  ──▶ neither will ever end

Replicas wait for each other in Horovod, not for a message, so who waits in messages (step_watch.py) does not show it.
What shows it is the step that the rank of the same stage is in: a step with gradients ends once all replicas have come
to it, so two that are in steps of different functions for long, and wait for no message there, never go on. One whose
replica is in no step, or in one without gradients, may only be late: that is told, once for each, and nothing ends.
"""

from __future__ import annotations

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
        patience: seconds in one step until the others are asked.
    """

    def __init__(
        self,
        transport: Transport,
        others: Sequence[int],
        describe: Callable[[int], str],
        named: Callable[[int], str],
        patience: float = PATIENCE,
    ) -> None:
        self._transport = transport
        self._others = others
        self._describe = describe
        self._named = named
        self._patience = patience
        self._suspects: dict[int, tuple[Any, ...]] = {}
        self._told: set[int] = set()

    def look(self) -> None:
        """Ask the replicas, if this rank has been in a step with gradients for long; cheap otherwise.

        Raises:
            RankMismatchError: one of them is in a step of another function with gradients, as it was the last time.
        """
        own = self._transport.ask(self._transport.rank) if self._others else None
        if own is None or not self._may_average(own):
            self._suspects.clear()
            return
        for rank in self._others:
            self._look_at(rank, own)

    def _look_at(self, rank: int, own: dict[str, Any]) -> None:
        status = self._transport.ask(rank, _ANSWER_TIME)
        if status is None:
            self._suspects.pop(rank, None)
            return
        step, place = (own["program"], own["step"]), (status["program"], status["step"])
        function = _averaging[own["program"]]
        their = _averaging.get(status["program"]) if status["program"] in _everywhere else None
        if status["in_step"] and their == function:
            self._suspects.pop(rank, None)
            return
        if status["in_step"] and their is not None and self._may_average(status):
            # Seen twice, so that its end was not on its way to us when it was seen.
            if self._suspects.get(rank) == (step, place):
                raise RankMismatchError(f"{self._here(own)}, while {self._there(rank, status)}. {_ADVICE} {SAME_STEPS}")
            self._suspects[rank] = step, place
            return
        self._suspects.pop(rank, None)
        if status["step_seconds"] > self._patience and own["program"] not in self._told:
            self._told.add(own["program"])
            tell(f"smp_tf: {self._here(own)}; {self._there(rank, status)}. The job goes on.")

    def _may_average(self, status: dict[str, Any]) -> bool:
        """Whether a rank may wait for its replicas: it has been in a step for long, and waits for no message of it."""
        waits = any(wait["program"] == status["program"] for wait in status["waits"])
        is_long = status["step_seconds"] > self._patience
        return status["in_step"] and is_long and status["program"] in _averaging and not waits

    def _here(self, own: dict[str, Any]) -> str:
        us = self._describe(own["rank"])
        return (
            f"{us[:1].upper()}{us[1:]} has been in step {own['step']} of {self._named(own['program'])} for "
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


_ADVICE = (
    "Each averages gradients with the other, of different steps, so neither can end: all replicas must call the steps "
    "that give gradients in the same order."
)
