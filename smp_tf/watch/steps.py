"""Notices that ranks in different steps, or different messages, wait for each other without an end.

    rank 0: in a step of `train`, waits for a message of it from rank 1 ──▶
    rank 1: in a step of `evaluate`, waits for a message of it from rank 0 ──▶ ... around to the first

Each step of such a circle could only end after the next. Within one step there is no circle, since its task lists were
checked. A slow rank waits for no message, so no circle leads over it. Two calls of one step function are two steps: a
rank that catches an error of a step and goes on to the next leaves the others in the first.

    rank 0: in smp.recv_from rank 1 ──▶ rank 1: at smp.barrier(WORLD) ──▶ ... around to the first

A script in a call that waits for a message sends nothing else until the call ends. So a circle over such a rank never
ends, either. Only one side waits for a message that is being transferred, so it closes no circle. (Where a rank is in
an exchange and another rank's step waits for it, the exchange notices that itself, by deadlock.py.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from smp_tf.announce import tell_in_time
from smp_tf.errors import RankMismatchError
from smp_tf.job_state import JobState
from smp_tf.watch.deadlock import (
    CAUGHT,
    OBJECT,
    SAME_MESSAGES,
    SAME_STEPS,
    STUCK,
    stuck_messages,
    stuck_waits,
    wait_in_words,
)

if TYPE_CHECKING:
    from smp_tf.ops.transport import Transport

# Seconds between two looks. A circle must be seen twice.
INTERVAL = 2.5
_ANSWER_TIME = 1.0
_TELL_TIME = 2.0

#: Names of programs, by number.
_programs: JobState[dict[int, str]] = JobState(dict)


def name_program(number: int, words: str) -> None:
    """Notes the name of the step that a program number stands for, for messages."""
    _programs()[number] = words


class StepWatch:
    """Looks from time to time, in a thread of its own, whether this rank is stuck in a circle of steps.

    Args:
        transport: how other ranks are asked, and told.
        describe: names a rank for messages.
        interval: seconds between two looks.
        stuck: seconds after which a message that has not come is not merely on its way.
        other_look: looks at what no message shows. It may raise `RankMismatchError`, too.
    """

    def __init__(
        self,
        transport: Transport,
        describe: Callable[[int], str],
        interval: float = INTERVAL,
        stuck: float = STUCK,
        other_look: Callable[[], None] | None = None,
    ) -> None:
        self._transport = transport
        self._other_look = other_look
        self._describe = describe
        self._interval = interval
        self._stuck = stuck
        self._suspect: tuple[Any, ...] | None = None
        self._has_missed = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="smp_tf step watch", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread. The transport may be closed afterwards."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        looks = [self.look] + ([self._other_look] if self._other_look is not None else [])
        while not self._ending.wait(self._interval):
            for look in looks:
                try:
                    look()
                except RankMismatchError as error:
                    self._transport.abort(str(error), timeout=_TELL_TIME, type=type(error).__name__)
                    return
                except Exception as error:
                    if self._ending.is_set() or not self._transport.is_open:
                        return
                    self._miss_a_look(error)

    def _miss_a_look(self, error: Exception) -> None:
        """Says once that a look has failed. A good training does not end for it, and the next look may succeed."""
        if not self._has_missed:
            self._has_missed = True
            tell_in_time(
                f"smp_tf: {self._describe(self._transport.rank)} could not look whether ranks wait for each other: "
                f"{error!r}. The job goes on; it looks again every {self._interval:g} s."
            )

    def look(self) -> None:
        """Follows from rank to rank who waits for whom, beginning with this one.

        Raises:
            RankMismatchError: the way leads back to this rank, and did so the last time.
        """
        circle = self._circle()
        seen = None
        if circle is not None:
            seen = tuple((s["rank"], s["program"], s["step"], w["label"], w["microbatch"]) for s, w in circle)
        if seen is None or seen != self._suspect:
            self._suspect = seen
            return
        assert circle is not None
        text = "; ".join(
            f"{self._describe(status['rank'])} is {_place(status)} and " + wait_in_words(wait, f"rank {wait['peer']}")
            for status, wait in circle
        )
        if not all(status["in_step"] for status, _ in circle):
            raise RankMismatchError(f"The ranks wait for each other, and none can go on: {text}. {SAME_MESSAGES}")
        advice = SAME_STEPS
        if len({status["program"] for status, _ in circle}) == 1:
            advice += f" {CAUGHT}"
        raise RankMismatchError(f"The ranks are in different steps and wait for each other: {text}. {advice}")

    def _circle(self) -> list[tuple[dict[str, Any], dict[str, Any]]] | None:
        """Returns the statuses and waits on a way from this rank back to itself, if the wait can never end."""
        own = self._transport.rank
        way: list[tuple[dict[str, Any], dict[str, Any]]] = []
        asked: set[int] = set()

        def follow(rank: int) -> bool:
            asked.add(rank)
            status = self._transport.ask(rank, _ANSWER_TIME)
            if status is None:
                return False
            for wait in stuck_waits(status, self._stuck) + stuck_messages(status, self._stuck):
                way.append((status, wait))
                if wait["peer"] == own or (wait["peer"] not in asked and follow(wait["peer"])):
                    return True
                way.pop()
            return False

        return way if follow(own) and _is_endless(way) else None


def _is_endless(way: list[tuple[dict[str, Any], dict[str, Any]]]) -> bool:
    """Returns whether a circle of waits can never end and is found by nobody else."""
    steps = {(status["program"], status["step"]) for status, _ in way if status["in_step"]}
    if all(status["in_step"] for status, _ in way):
        return len(steps) > 1
    return not steps or any(wait["label"] == OBJECT for status, wait in way if not status["in_step"])


def _place(status: dict[str, Any]) -> str:
    if status["in_step"]:
        return f"in step {status['step']} of {named(status['program'])}"
    return str(status["activity"])


def named(program: int) -> str:
    """Returns words for a program: its step and arguments, as far as this rank knows them."""
    return _programs().get(program, f"program {program}")
