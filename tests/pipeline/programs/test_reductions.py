"""The averages over replicas in the list: where they stand, what they need, who waits for whom, and what they cost."""

from __future__ import annotations

import dataclasses

import pytest

from smp_tf.pipeline.errors import ProgramError
from smp_tf.pipeline.programs.check import check
from smp_tf.pipeline.programs.chunk_times import ChunkTimes
from smp_tf.pipeline.programs.draw import draw
from smp_tf.pipeline.programs.reductions import add_reductions, check_replicas
from smp_tf.pipeline.programs.shared_host import Sharing, simulate_on_hosts
from smp_tf.pipeline.programs.simulate import simulate
from smp_tf.pipeline.programs.text import parse, parse_program
from smp_tf.pipeline.task import BucketMakers, Edge, Program

#: Rank 0 has chunks 0 and 2, rank 1 chunk 1; what chunk 2 adds to a gradient of chunk 1 is sent once per step.
LINES = """
0F0 2F0 2B0 0B0 2S7
1F0 1R7 1B0
"""
EDGES = (
    Edge(7, src_chunk=2, src_sweep=1, dst_chunk=1, dst_sweep=None, per="step"),
    Edge(0, src_chunk=0, src_sweep=0, dst_chunk=1, dst_sweep=0),
)
BUCKETS = (
    BucketMakers(0, 0, frozenset({(2, 1, 0)}), nbytes=3),
    BucketMakers(0, 1, frozenset({(0, 1, 0)}), nbytes=1),
    BucketMakers(1, 0, frozenset({(1, 1, 0)}), frozenset({7}), nbytes=4),
)


def program(text: str = LINES) -> Program:
    return parse_program(text)


def with_buckets(text: str) -> Program:
    return dataclasses.replace(program(text), buckets=BUCKETS)


def test_a_bucket_stands_behind_the_last_task_that_adds_to_it() -> None:
    assert add_reductions(program(), BUCKETS).text().splitlines() == [
        "0F0 2F0 2B0 0REDUCE0 0B0 0REDUCE1 2S7",
        "1F0 1R7 1B0 1REDUCE0",
    ]
    with pytest.raises(ProgramError, match="made by a task of its stage"):
        add_reductions(program(), [BucketMakers(1, 0, frozenset({(0, 1, 0)}))])
    with pytest.raises(ProgramError, match="one of the 2 stages"):
        add_reductions(program(), [BucketMakers(2, 0, frozenset({(0, 1, 0)}))])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0F0 2F0 0REDUCE0 2B0 0B0 0REDUCE1 2S7\n1F0 1R7 1B0 1REDUCE0", "0REDUCE0 before 2B0 on rank 0"),
        ("0F0 2F0 2B0 0REDUCE0 0REDUCE1 0B0 2S7\n1F0 1R7 1B0 1REDUCE0", "0REDUCE1 before 0B0 on rank 0"),
        ("0F0 2F0 2B0 0REDUCE0 0B0 0REDUCE1 2S7\n1F0 1B0 1REDUCE0 1R7", "1REDUCE0 before 1R7 on rank 1"),
        ("0F0 2F0 2B0 0B0 0APPLY0 0REDUCE0 2S7\n1F0 1R7 1B0 1REDUCE0", "0APPLY0 before 0REDUCE0 on rank 0"),
        ("0F0 2F0 2B0 0B0 2S7\n1F0 1R7 1B0 0REDUCE0", "Received: 0REDUCE0 on rank 1"),
    ],
)
def test_one_that_stands_too_early_or_elsewhere_is_told(text: str, told: str) -> None:
    with pytest.raises(ProgramError) as caught:
        check(with_buckets(text), _local_edges(text))
    assert told in str(caught.value)


def _local_edges(text: str) -> tuple[Edge, ...]:
    return EDGES[:1] if "R7" in text else ()


def test_a_bucket_needs_its_own_gradients_alone() -> None:
    text = "0F0 2F0 2B0 0REDUCE0 0B0 0REDUCE1 2S7\n1F0 1R7 1B0 1REDUCE0"
    check(with_buckets(text), EDGES[:1])
    # Where nobody says what makes a bucket, it is all that the rank makes.
    with pytest.raises(ProgramError, match="0REDUCE0 before 0B0"):
        check(program(text), EDGES[:1])


def test_ranks_that_wait_for_what_a_bucket_lacks_are_told() -> None:
    text = "0F0 2F0 2B0 0REDUCE0 0B0 0REDUCE1\n1F0 1R7 1B0 1REDUCE0 2S7"
    with pytest.raises(ProgramError, match="2S7 on rank 1"):
        check(with_buckets(text), EDGES[:1])


def test_replicas_that_disagree_are_told_who_waits_for_whom() -> None:
    alike = parse_program("0F0 0F1 0B0 0B1 0REDUCE0 0REDUCE1\n1F0 1B0 1F1 1B1 1REDUCE0 1REDUCE1")
    fewer = parse_program("0F0 0B0 0REDUCE0 0REDUCE1\n1F0 1B0 1REDUCE0 1REDUCE1")
    check_replicas([alike, fewer])
    turned = parse_program("0F0 0B0 0REDUCE0 0REDUCE1\n1F0 1B0 1REDUCE1 1REDUCE0")
    check(turned)
    with pytest.raises(ProgramError) as caught:
        check_replicas([alike, turned])
    assert str(caught.value).splitlines()[1:] == [
        "  replica 0 stands before 1REDUCE0 and waits for replica 1",
        "  replica 1 stands before 1REDUCE1 and waits for replica 0",
    ]
    assert "on rank 1 of each" in str(caught.value)
    lacking = parse_program("0F0 0B0 0REDUCE0\n1F0 1B0 1REDUCE0 1REDUCE1")
    with pytest.raises(ProgramError) as caught:
        check_replicas([lacking, alike])
    assert str(caught.value).splitlines()[1:] == [
        "  replica 0 is through its list",
        "  replica 1 stands before 0REDUCE1 and waits for replica 0",
    ]
    with pytest.raises(ProgramError, match="the same stages"):
        check_replicas([alike, parse_program("0F0 0B0")])


def test_averages_are_in_the_time_of_a_step() -> None:
    plain = parse_program("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    buckets = [BucketMakers(0, 0, frozenset({(0, 1, 0)})), BucketMakers(1, 0, frozenset({(1, 1, 0)}))]
    both = add_reductions(plain, buckets)
    check(both)
    first, second = parse("0REDUCE0"), parse("1REDUCE0")
    assert simulate(both).step_time == simulate(plain).step_time == 9.0
    # Of the last stage they are hidden by what the first one still computes.
    hidden = simulate(both, once={second: 2.0})
    assert (hidden.step_time, hidden.computed) == (9.0, 9.0)
    seen = simulate(both, once={first: 1.5, second: 3.0})
    assert (seen.step_time, seen.computed, seen.busy) == (10.5, 9.0, (6.0, 6.0))
    longest = simulate(both, once={first: 1.5, second: 30.0})
    assert longest.step_time == 7.0 + 30.0
    shared = simulate_on_hosts(both, ChunkTimes(), None, Sharing((0, 1), 1.0, 1.0), once={first: 1.5, second: 3.0})
    assert shared == seen


def test_buckets_of_a_rank_go_one_after_the_other_and_updates_wait_for_theirs() -> None:
    buckets = (BucketMakers(0, 0, frozenset({(0, 1, 0)})), BucketMakers(0, 1, frozenset({(0, 1, 0)})))
    text = "0F0 0B0 0REDUCE0 0REDUCE1 0APPLY0 0APPLY1"
    both = dataclasses.replace(parse_program(text), buckets=buckets)
    check(both)
    seconds = {"0REDUCE0": 2.0, "0REDUCE1": 4.0, "0APPLY0": 1.0, "0APPLY1": 1.0}
    once = {parse(task): taken for task, taken in seconds.items()}
    for timeline in (
        simulate(both, once=once),
        simulate_on_hosts(both, ChunkTimes(), None, Sharing((0,), 1.0, 1.0), once=once),
    ):
        assert {str(span.task): (span.start, span.end) for span in timeline.spans[0]} == {
            "0F0": (0.0, 1.0), "0B0": (1.0, 3.0), "0REDUCE0": (3.0, 5.0), "0REDUCE1": (5.0, 9.0),
            "0APPLY0": (5.0, 6.0), "0APPLY1": (9.0, 10.0),
        }  # fmt: skip
        assert timeline.step_time == 10.0
    line = draw(simulate(both, once=once), unit=1.0).splitlines()[1].split()
    assert line == ["......."] * 3 + ["REDUCE0========", "REDUCE1========================", "......."]
