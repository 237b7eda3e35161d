"""Updates of weights are tasks: where they stand, what they need, and that a list says who writes them."""

from __future__ import annotations

import dataclasses

import pytest

from smp_tf.pipeline.errors import ProgramError
from smp_tf.pipeline.programs.check import check
from smp_tf.pipeline.programs.chunk_times import ChunkTimes
from smp_tf.pipeline.programs.draw import draw
from smp_tf.pipeline.programs.reductions import add_reductions
from smp_tf.pipeline.programs.shared_host import Sharing, simulate_on_hosts
from smp_tf.pipeline.programs.simulate import simulate
from smp_tf.pipeline.programs.text import parse, parse_program
from smp_tf.pipeline.programs.updates import add_updates
from smp_tf.pipeline.task import BucketMakers

PLAIN = parse_program("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
BUCKETS = [BucketMakers(stage, number, frozenset({(stage, 1, 0)})) for stage, number in ((0, 0), (0, 1), (1, 0))]


def test_updates_stand_last_each_for_the_average_of_its_bucket() -> None:
    program = add_updates(add_reductions(PLAIN, BUCKETS), {0: [0, 1], 1: [0]})
    check(program)
    assert program.text().splitlines() == [
        "0F0 0F1 0B0 0B1 0REDUCE0 0REDUCE1 0APPLY0 0APPLY1",
        "1F0 1B0 1F1 1B1 1REDUCE0 1APPLY0",
    ]


def test_sums_over_stages_come_before_them_and_after_the_averages() -> None:
    program = add_updates(add_reductions(PLAIN, BUCKETS[1:]), {0: [1]}, stage_sums=2)
    check(program)
    assert program.text().splitlines() == [
        "0F0 0F1 0B0 0B1 0REDUCE1 0SUM 0SUM1 0APPLY1",
        "1F0 1B0 1F1 1B1 1REDUCE0 1TELL 1SUM 1TELL1 1SUM1",
    ]
    once = {parse("1REDUCE0"): 4.0, parse("0SUM"): 1.0, parse("0APPLY1"): 2.0}
    found = simulate(program, once=once)
    # The last stage is done at 7 and has its average at 11; only then the first one puts both norms together.
    assert [found.span_of(parse(task)).start for task in ("0SUM", "0APPLY1")] == [11.0, 12.0]
    assert (found.computed, found.step_time) == (9.0, 14.0)
    assert simulate_on_hosts(program, ChunkTimes(), None, Sharing((0, 1), 1.0, 1.0), once=once) == found


def test_one_stage_has_nobody_to_sum_with() -> None:
    alone = parse_program("0F0 0B0")
    assert add_updates(alone, {0: [None]}, stage_sums=1).text() == "0F0 0B0 0APPLY"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0F0 0F1 0B0 0APPLY 0B1\n1F0 1B0 1F1 1B1", "0APPLY before 0B1 on rank 0"),
        ("0F0 0F1 0B0 0B1 0APPLY0 0REDUCE0\n1F0 1B0 1F1 1B1", "0APPLY0 before 0REDUCE0 on rank 0"),
        ("0F0 0F1 0B0 0B1 0APPLY 0SUM\n1F0 1B0 1F1 1B1 1TELL 1SUM", "0APPLY before 0SUM on rank 0"),
        ("0F0 0F1 0B0 0B1 0SUM\n1F0 1B0 1F1 1TELL 1B1 1SUM", "1TELL before 1B1 on rank 1"),
    ],
)
def test_one_that_stands_too_early_is_told(text: str, told: str) -> None:
    with pytest.raises(ProgramError, match=told):
        check(parse_program(text))


def test_what_the_script_writes_is_drawn_in_parentheses() -> None:
    alone = parse_program("0F0 0B0")
    once = {parse("0APPLY"): 1.0}
    ours, scripts = (
        draw(simulate(add_updates(alone, {0: [None]}, by_script=by_script), once=once)) for by_script in (False, True)
    )
    assert ours == "rank 0  F0=== B0========= APPLY"
    assert scripts == "rank 0  F0===== B0============= (APPLY)"


def test_a_bucket_that_is_whole_within_the_last_task_begins_there() -> None:
    late = add_reductions(PLAIN, BUCKETS[:2])
    early = [dataclasses.replace(BUCKETS[0], share=0.25), dataclasses.replace(BUCKETS[1], share=0.75)]
    once = {parse("0REDUCE0"): 1.5, parse("0REDUCE1"): 1.5}
    # The last task of the first rank runs from 7 to 9.
    for buckets, spans in ((BUCKETS[:2], [(9.0, 10.5), (10.5, 12.0)]), (early, [(7.5, 9.0), (9.0, 10.5)])):
        program = add_reductions(PLAIN, buckets)
        for found in (
            simulate(program, once=once),
            simulate_on_hosts(program, ChunkTimes(), None, Sharing((0, 1), 1.0, 1.0), once=once),
        ):
            assert [(s.start, s.end) for s in map(found.span_of, once)] == spans
        assert program.ranks == late.ranks
