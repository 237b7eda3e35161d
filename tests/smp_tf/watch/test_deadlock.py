"""A rank that waits in an exchange ends only if another waits for it, certainly and for long."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest

from smp_tf.errors import RankMismatchError
from smp_tf.ops.transport import REPLICA_PROGRAMS
from smp_tf.watch.deadlock import DeadlockWatch

WAIT = {
    "peer": 1,
    "is_send": False,
    "label": "net/dense/Relu:0 (stage 1 to 0)",
    "program": 3,
    "step": 7,
    "microbatch": 0,
    "seconds": 6.0,
}
STUCK = {"rank": 0, "in_step": True, "program": 3, "step": 7, "waits": [WAIT]}
OUTSIDE = {"rank": 1, "in_step": False, "program": 3, "step": 6, "waits": []}


class Answers:
    """A transport of rank 1 that only answers questions; a list of answers is used up in turn."""

    def __init__(self, *of_rank_0: dict[str, Any] | None, own: dict[str, Any] = OUTSIDE) -> None:
        self.rank = 1
        self._of_rank_0 = list(of_rank_0)
        self._own = own
        self.asked = 0

    def ask(self, rank: int, timeout: float = 1.0) -> dict[str, Any] | None:
        if rank == self.rank:
            return self._own
        self.asked += 1
        return self._of_rank_0[min(self.asked, len(self._of_rank_0)) - 1]


def watch(transport: Answers, patience: float = 0.0) -> DeadlockWatch:
    return DeadlockWatch(
        transport,  # type: ignore[arg-type]
        [0],
        "about to run step 'train' for the first time on x: float32(12, 8)",
        "rank {}".format,
        patience=patience,
        interval=0.0,
    )


def changed(status: dict[str, Any], **of_wait: Any) -> dict[str, Any]:
    other = copy.deepcopy(status)
    other["waits"][0].update(of_wait)
    return other


def test_a_rank_that_waits_in_a_step_for_one_in_an_exchange_is_an_error() -> None:
    looking = watch(Answers(STUCK))
    looking.look()
    with pytest.raises(RankMismatchError) as error:
        looking.look()
    assert str(error.value) == (
        "Rank 1 is about to run step 'train' for the first time on x: float32(12, 8), while rank 0 is in step 7 and "
        "waits for 'net/dense/Relu:0 (stage 1 to 0)' from rank 1. Every rank must call the same steps in the same "
        "order, and the ranks of a replica with batches of the same shapes."
    )


def test_a_wait_for_another_replicas_part_of_a_sum_is_one_as_well() -> None:
    looking = watch(Answers(changed(STUCK, program=REPLICA_PROGRAMS[5], label="moments of norm")))
    looking.look()
    with pytest.raises(RankMismatchError, match="is in step 7 and waits for 'moments of norm' from rank 1"):
        looking.look()


def test_a_send_that_nobody_takes_is_one_as_well() -> None:
    looking = watch(Answers(changed(STUCK, is_send=True)))
    looking.look()
    with pytest.raises(RankMismatchError, match="is in step 7 and waits until rank 1 takes 'net/dense"):
        looking.look()


@pytest.mark.parametrize(
    "answers",
    [
        [None],
        [{**STUCK, "waits": []}],
        [{**STUCK, "in_step": False}],
        [changed(STUCK, peer=2)],
        [changed(STUCK, seconds=4.9)],
        [changed(STUCK, program=0xFFFFFFFF00000000)],
        [changed(STUCK, microbatch=number) for number in range(5)],
        [STUCK, {**STUCK, "waits": []}, STUCK, None, STUCK],
    ],
    ids=["silent", "computing", "outside", "for_another", "briefly", "no_tensor", "moving_on", "on_and_off"],
)
def test_a_slow_rank_is_none(answers: list[dict[str, Any] | None]) -> None:
    transport = Answers(*answers)
    looking = watch(transport)
    for _ in range(max(2, len(answers))):
        looking.look()
    assert transport.asked == max(2, len(answers))


def test_a_rank_that_is_in_a_step_in_another_thread_still_sends() -> None:
    transport = Answers(STUCK, own={**OUTSIDE, "in_step": True})
    looking = watch(transport)

    def look_twice() -> None:
        looking.look()
        looking.look()

    thread = threading.Thread(target=look_twice)
    thread.start()
    thread.join()
    assert transport.asked == 0


def test_a_rank_that_has_caught_the_error_of_its_step_does_not() -> None:
    """It once waited for the others until stall_timeout, and they for it."""
    looking = watch(Answers(STUCK, own={**OUTSIDE, "in_step": True}))
    looking.look()
    with pytest.raises(RankMismatchError, match="An error of a step that one rank catches leaves the others in that"):
        looking.look()


def test_nobody_is_asked_before_patience_ends() -> None:
    transport = Answers(STUCK)
    looking = watch(transport, patience=3600.0)
    looking.look()
    looking.look()
    assert transport.asked == 0
