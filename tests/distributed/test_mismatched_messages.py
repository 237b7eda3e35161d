"""Messages that nobody sends or receives are errors in time, and an array of any size is sent without copies of it."""

from __future__ import annotations

import pytest

from tests.distributed.conftest import LaunchedCase
from tests.distributed.harness import Case, CaseResult

CASES = "tests.distributed.cases.mismatched_messages"
TWO = {"partitions": 2}
# Far less than the stall timeout, which is half an hour.
SOON = 120.0


def on(name: str) -> LaunchedCase:
    return LaunchedCase(2, CASES, Case(name, name, {}, TWO))


def large(name: str, count: int) -> LaunchedCase:
    # The peak of memory is that of a process.
    return LaunchedCase(2, CASES, Case(name, "large", {"count": count}, TWO), fresh=True)


@pytest.mark.parametrize("launched", [large("32 MB", 4 << 20)], ids=["32 MB"])
def test_an_array_is_received_where_it_is_used(case_result: CaseResult) -> None:
    sender, receiver = case_result.values()
    assert (receiver["first"], receiver["last"]) == (1.0, (4 << 20) - 1)
    # Beside the array itself, which the receiver holds once: buffers of the transport, but no copy.
    assert sender["taken"] < 0.6 * sender["bytes"]
    assert receiver["taken"] < 1.6 * receiver["bytes"]


@pytest.mark.large
@pytest.mark.full
@pytest.mark.parametrize("launched", [large("1 GB", 1 << 27)], ids=[""])
def test_an_array_of_a_gigabyte(case_result: CaseResult) -> None:
    sender, receiver = case_result.values()
    assert (receiver["first"], receiver["last"]) == (1.0, (1 << 27) - 1)
    assert sender["taken"] < 0.1 * sender["bytes"]
    assert receiver["taken"] < 1.1 * receiver["bytes"]


@pytest.mark.parametrize("launched", [on("nobody_receives")], ids=[""])
def test_a_message_that_nobody_received_is_told_at_the_end(case_result: CaseResult) -> None:
    case_result.values()
    assert "smp_tf: rank 1 ends without having received 1 message that rank 0 sent." in case_result.output[1]
    assert "without having received" not in case_result.output[0]


@pytest.mark.parametrize(
    ("launched", "words"),
    [
        (on("both_receive"), ("in smp.recv_from rank 1 and waits for an object of rank 1", "rank 1 (")),
        (on("gather_and_broadcast"), ("is in smp.allgather(WORLD) and waits for an object of rank 1", "smp.barrier(")),
        (on("both_send_what_is_large"), ("in smp.send to rank 1 and waits until rank 1 takes an object", "rank 1 (")),
    ],
    ids=lambda value: value.case.name if isinstance(value, LaunchedCase) else "",
)
def test_ranks_that_wait_for_each_other_are_told_so(case_result: CaseResult, words: tuple[str, ...]) -> None:
    report = case_result.report()
    assert "The ranks wait for each other, and none can go on: " in report, report
    assert all(word in report for word in words), report
    for rank in case_result.ranks:
        assert rank.error
        assert rank.seconds < SOON
