"""Notices that replicas average the gradients of different steps, or that one waits long for another.

    rank 0: has come to an average of a step of `generator`, as rank 1 has not      ──▶
    rank 1: has come to an average of a step of `discriminator`, as rank 0 has not  ──▶ neither will ever end

Replicas wait for each other in Horovod, not for a message, so a circle of messages (steps.py) does not show it. It
shows in the averages and other collectives that each replica has come to and has not ended. A step with gradients ends
once all replicas have come to it. So two replicas that have long been in averages of different step functions never go
on. A replica that has not come to this rank's collective, or does not answer, may only be late: it computes, saves, or
hangs. That is told once for each replica, and ends all ranks after `stall_timeout`. So does a collective that does not
end although all are in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from smp_tf.announce import tell_in_time
from smp_tf.errors import RankMismatchError
from smp_tf.job_state import JobState
from smp_tf.watch.deadlock import SAME_STEPS, wait_in_words

if TYPE_CHECKING:
    from smp_tf.ops.transport import Transport

# Seconds in one step after which a rank asks its replicas. A missing message is told after the same time.
PATIENCE = 30.0
_ANSWER_TIME = 1.0
# How often a rank may fail to answer, since its host may be busy.
_SILENCE = 5.0

#: What the step function of a program that averages gradients is known by, by the program's number.
_averaging: JobState[dict[int, str]] = JobState(dict)
#: The programs among them whose number means the same on every replica.
_everywhere: JobState[set[int]] = JobState(set)


def know_program(number: int, function: str, *, everywhere: bool) -> None:
    """Notes that a program gives gradients, which replicas average.

    Args:
        number: of the program.
        function: what its step function is known by on all ranks.
        everywhere: whether all replicas have agreed on the number; else it may mean another program on others.
    """
    _averaging()[number] = function
    if everywhere:
        _everywhere().add(number)


class ReplicaWatch:
    """Looks, when it is asked to, whether this rank's step waits for replicas that do something else.

    Args:
        transport: how other ranks are asked.
        others: world ranks that hold the same stage of other replicas.
        describe: names a rank for messages.
        named: names a program for messages.
        stall_timeout: seconds that a rank may keep the others waiting.
        patience: seconds in one step until the others are asked, if this is less than `stall_timeout`.
        clock: returns the time in seconds.
        members: returns the ranks that take part in a collective of the script's own, or None for one of smp_tf's.
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
        members: Callable[[str], Sequence[int] | None] = lambda name: None,
    ) -> None:
        self._transport = transport
        self._others = others
        self._describe = describe
        self._named = named
        self._stall_timeout = stall_timeout
        self._patience = min(patience, stall_timeout)
        self._clock = clock
        self._members = members
        self._suspects: dict[int, tuple[Any, ...]] = {}
        self._silent_since: dict[int, float] = {}
        self._all_since: tuple[float, str, int] | None = None
        self._told: set[str] = set()

    def look(self) -> None:
        """Asks the replicas, if this rank has waited long for them. Otherwise it is cheap.

        Raises:
            RankMismatchError: a replica waits in a step of another function with gradients, as it did the last time; or
                the replicas have kept this rank waiting for `stall_timeout`.
        """
        own = self._transport.ask(self._transport.rank)
        if own is None or not self._waits_long(own):
            self._suspects.clear()
            self._silent_since.clear()
            self._all_since = None
            return
        if all([self._is_there(rank, own) for rank in self._awaited(own)]):
            self._look_at_all(own)
        else:
            self._all_since = None

    def _awaited(self, own: dict[str, Any]) -> Sequence[int]:
        """Returns the ranks that take part in the collective that this one is in."""
        members = self._members(own["collective"])
        return self._others if members is None else [rank for rank in members if rank != self._transport.rank]

    def _is_there(self, rank: int, own: dict[str, Any]) -> bool:
        """Returns whether another rank has come to this one's collective. If not, it tells so, or ends all."""
        status = self._transport.ask(rank, _ANSWER_TIME)
        if status is None:
            self._suspects.pop(rank, None)
            self._hear_nothing(rank, own)
            return False
        self._silent_since.pop(rank, None)
        takes_part = _is_join(status["collective"]) and self._members(own["collective"]) is not None
        if own["collectives"][0] in status["collectives"] or status["more_collectives"] or takes_part:
            self._suspects.pop(rank, None)
            return True
        step, place = (own["program"], own["step"]), (status["program"], status["step"])
        ours, theirs = self._averages_of(own), self._averages_of(status)
        if None not in (ours, theirs) and ours != theirs and self._waits_long(status):
            # It must be seen twice. The first time, its end may have been on its way to us.
            if self._suspects.get(rank) == (step, place):
                raise RankMismatchError(f"{self._here(own)}, while {self._there(rank, status)}. {_ADVICE} {SAME_STEPS}")
            self._suspects[rank] = step, place
            return False
        self._suspects.pop(rank, None)
        self._wait(own, self._there(rank, status), is_late=own["collective_seconds"] > self._stall_timeout)
        return False

    def _look_at_all(self, own: dict[str, Any]) -> None:
        """Tells of a collective that all have come to. It is slow on the network, or never ends."""
        now = self._clock()
        at = own["collectives"][0], own["step"]
        if self._all_since is None or self._all_since[1:] != at:
            self._all_since = now, *at
        if now - self._all_since[0] > self._stall_timeout:
            self._wait(
                own, "all of them have come to it: Horovod is stuck, or the network between their hosts", is_late=True
            )

    def _hear_nothing(self, rank: int, own: dict[str, Any]) -> None:
        if self._transport.await_goodbyes([rank], 0.0):
            self._silent_since.pop(rank, None)
            return  # it has left or is lost; the transport knows which
        now = self._clock()
        seconds = now - self._silent_since.setdefault(rank, now)
        if seconds > _SILENCE:
            why = "its process is stopped, out of reach, or has no processor time"
            self._wait(own, f"{self._describe(rank)} does not answer: {why}", is_late=seconds > self._stall_timeout)

    def _wait(self, own: dict[str, Any], there: str, *, is_late: bool) -> None:
        """Tells once that another rank is elsewhere. Ends all when it has been there for too long.

        Args:
            own: words for what this rank does.
            there: words for what the other rank does.
            is_late: whether the other rank has kept this one waiting for `stall_timeout`.
        """
        limit = f"stall_timeout = {self._stall_timeout:g} s"
        may_take_long = _is_join(own["collective"])
        if is_late and not may_take_long:
            raise RankMismatchError(
                f"{self._us(own)} gave up {self._place(own)} after {limit}: it waited for {self._whom(own)} at "
                f"'{own['collective']}', and {there}. {self._more_time(own)}"
            )
        if own["collective"] not in self._told:
            self._told.add(own["collective"])
            end = "hvd.join waits as long as others train" if may_take_long else f"it ends after {limit}"
            tell_in_time(f"smp_tf: {self._here(own)}; {there}. The job goes on; {end}.")

    def _waits_long(self, status: dict[str, Any]) -> bool:
        return bool(status["collectives"]) and status["collective_seconds"] > self._patience

    def _averages_of(self, status: dict[str, Any]) -> str | None:
        """Returns the step function whose gradients a rank is about to average, where it is known."""
        program = status["program"]
        known = program in _everywhere() or status["rank"] == self._transport.rank
        return _averaging().get(program) if status["in_step"] and known else None

    def _us(self, own: dict[str, Any]) -> str:
        us = self._describe(own["rank"])
        return f"{us[:1].upper()}{us[1:]}"

    def _here(self, own: dict[str, Any]) -> str:
        return (
            f"{self._us(own)} has waited {own['collective_seconds']:.0f} s for {self._whom(own)} at "
            f"'{own['collective']}' {self._place(own)}"
        )

    def _whom(self, own: dict[str, Any]) -> str:
        return "the other replicas" if self._members(own["collective"]) is None else "other processes"

    def _more_time(self, own: dict[str, Any]) -> str:
        return _MORE_TIME if self._members(own["collective"]) is None else _ALL_CALL

    def _place(self, own: dict[str, Any]) -> str:
        """Returns words for where this rank is in its script."""
        if own["step"] < 0:
            return "before its first step"
        return f"{'in' if own['in_step'] else 'after'} step {own['step']} of {self._named(own['program'])}"

    def _there(self, rank: int, status: dict[str, Any]) -> str:
        """Returns words for what another rank does, to follow "while"."""
        who, seconds = self._describe(rank), f"{status['step_seconds']:.0f} s"
        doing = f", doing '{status['activity']}'" if status["activity"] else ""
        if status["step"] < 0:
            return f"{who} has begun no step yet, {seconds} after its start{doing}"
        if not status["in_step"]:
            waits = f" and waits at '{status['collective']}'" if status["collectives"] else ""
            return f"{who} ended its step {status['step']} {seconds} ago{doing}{waits}"
        # On the other rank, a number that not all have agreed on may stand for another program.
        known = status["program"] in _everywhere()
        of = f"of {self._named(status['program'])}" if known else "of a program that this rank does not know"
        if status["waits"]:
            wait = status["waits"][0]
            doing = wait_in_words(wait, self._describe(wait["peer"]))
        elif status["collectives"]:
            doing = f"waits at '{status['collective']}'"
        else:
            doing = "computes, or hangs there"
        return f"{who} has been in step {status['step']} {of} for {seconds} and {doing}"


def _is_join(collective: str) -> bool:
    """Returns whether a rank is in `hvd.join`. Until all have joined, it takes part in the others' collectives."""
    return collective.split(" ", 1)[0] == "hvd.join"


_MORE_TIME = (
    "All replicas must come to every step that gives gradients, and through it; a rank that only needs longer gets it "
    "with a larger stall_timeout."
)
_ALL_CALL = (
    "All processes of a process set must make each call of Horovod over it; a rank that only needs longer gets it with "
    "a larger stall_timeout."
)
_ADVICE = (
    "Each averages gradients with the other, of different steps, so neither can end: all replicas must call the steps "
    "that give gradients in the same order."
)
