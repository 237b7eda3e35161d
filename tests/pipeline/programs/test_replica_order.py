"""Replicas that make sums over each other within tasks: the orders in which they can, and those in which they wait."""

from __future__ import annotations

import pytest

from smp_tf.pipeline.errors import ProgramError
from smp_tf.pipeline.programs.replica_order import check_replica_order
from smp_tf.pipeline.programs.text import parse_program
from smp_tf.pipeline.schedules.schedule import build
from smp_tf.pipeline.task import Kind, Program, Task


def with_sums(task: Task) -> bool:
    return task.kind in (Kind.F, Kind.B, Kind.I, Kind.W)


def of(*texts: str) -> list[Program]:
    return [parse_program(text) for text in texts]


def test_replicas_that_run_their_tasks_in_one_order_agree() -> None:
    check_replica_order(of("0F0 0F1 0B0 0B1", "0F0 0F1 0B0 0B1"), None, with_sums)
    # What one replica does not have holds up nobody.
    check_replica_order(of("0F0 0F1 0B0 0F2 0B1 0B2", "0F0 0F1 0B0 0B1"), None, with_sums)


def test_another_order_on_another_replica_is_refused() -> None:
    with pytest.raises(ProgramError) as told:
        check_replica_order(of("0F0 0F1 0B0 0B1", "0F0 0B0 0F1 0B1"), None, with_sums)
    assert str(told.value).splitlines() == [
        "Replicas must come to their sums over each other in one order, such as to moments over the samples of all "
        "replicas. Otherwise they wait for each other forever. With this schedule, a replica with fewer microbatches "
        "has another order. Give all replicas batches of one size (drop_remainder=True), or use 'pipeline': "
        "'interleaved', 'simple' or 'zb_h1'. Received:",
        "  replica 0, rank 0 stands before 0F1",
        "  replica 1, rank 0 stands before 0B0",
    ]
    # Without sums in backward, they wait for nobody.
    check_replica_order(of("0F0 0F1 0B0 0B1", "0F0 0B0 0F1 0B1"), None, lambda task: task.kind is Kind.F)


def test_ranks_wait_for_each_other_over_stages_too() -> None:
    """Each rank has one task with sums, and neither order is wrong by itself."""
    one, other = "0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1", "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
    with pytest.raises(ProgramError, match="replica 1, rank 1 stands before 1B0"):
        check_replica_order(of(one, other), None, lambda task: task.chunk == 1)
    check_replica_order(of(one, other), None, lambda task: task.chunk == 0)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_replicas_with_fewer_microbatches_come_to_sums_in_an_order_that_can_run(stages: int) -> None:
    for schedule in ("simple", "interleaved", "zb_h1"):
        programs = [build(schedule, stages=stages, microbatches=number) for number in range(1, 9)]
        check_replica_order(programs, None, with_sums)


def test_with_several_chunks_a_rank_they_may_not_and_with_as_many_they_do() -> None:
    for schedule in ("interleaved_1f1b", "zb_v", "v_half"):
        equal = [build(schedule, stages=2, microbatches=4)] * 3
        check_replica_order(equal, None, with_sums)
        with pytest.raises(ProgramError, match="drop_remainder=True"):
            check_replica_order([*equal, build(schedule, stages=2, microbatches=3)], None, with_sums)
