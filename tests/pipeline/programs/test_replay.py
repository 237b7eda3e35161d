"""When tasks run on paper, who gets stuck, and that none is looked at more often where there are many."""

from __future__ import annotations

import gc
import itertools
import os
import sys
from typing import Any

import pytest

from smp_tf.pipeline.collection import collection_put_off
from smp_tf.pipeline.errors import ProgramError
from smp_tf.pipeline.programs.check import check
from smp_tf.pipeline.programs.chunk_times import ChunkTimes
from smp_tf.pipeline.programs.dependencies import dependencies
from smp_tf.pipeline.programs.replay import Replay, Stuck, replay
from smp_tf.pipeline.programs.shared_host import Sharing, simulate_on_hosts
from smp_tf.pipeline.programs.simulate import simulate
from smp_tf.pipeline.programs.text import parse_program
from smp_tf.pipeline.programs.transfers import add_transfers
from smp_tf.pipeline.schedules.schedule import SCHEDULES, build
from smp_tf.pipeline.task import Edge, Kind, Program, Task
from tests.full_only import params

EDGES = [Edge(0, 0, 0, 1, 0), Edge(1, 1, 1, 0, 1)]


def run(text: str, edges: list[Edge] | None = None, **more: Any) -> Replay:
    program = parse_program(text)
    return replay(program, dependencies(program, edges), lambda _: 1.0, lambda _: 0.5, **more)


def test_what_another_rank_makes_comes_a_latency_later() -> None:
    found = run("0F0 0B0\n1F0 1B0")
    assert found.starts == ((0.0, 4.0), (1.5, 2.5))
    assert found.ends == ((1.0, 5.0), (2.5, 3.5))
    assert not found.stuck


def test_a_transfer_moves_when_both_ends_are_open() -> None:
    found = run("0F0 0S0.0 0R1.0 0B0\n1R0.0 1F0 1B0 1S1.0", EDGES)
    assert found.starts == ((0.0, 1.0, 1.0, 4.0), (0.0, 1.5, 2.5, 3.5))
    assert found.ends == ((1.0, 1.5, 4.0, 5.0), (1.5, 2.5, 3.5, 4.0))


def test_a_send_waits_for_the_buffer_of_an_earlier_one() -> None:
    text = "0F0 0S0.0 0F1 0S0.1 0F2 0S0.2 0F3\n1R0.0 1F0 1B0 1R0.1 1F1 1R0.2 1F2"
    free = run(text, EDGES[:1])
    assert free.starts[0] == (0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0)
    # 1R0.1 opens at 3.5, so the buffer of 0S0.1 is free at 4.
    one = run(text, EDGES[:1], send_buffers={0: 1})
    assert one.starts[0] == (0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0)


def test_who_is_stuck_is_told_with_what_is_lacking() -> None:
    found = run("0F0 0R1.0 0B0\n1R0.0 1F0 1B0 1S1.0", EDGES)
    assert found.stuck == (
        Stuck(0, 2, (Task(Kind.RECV, 0, 0, edge=1),)),
        Stuck(1, 1, (Task(Kind.RECV, 1, 0, edge=0),)),
    )


def test_a_send_that_nobody_takes_lacks_its_receive() -> None:
    """Told was what its tensor is made of; of one that is there from the start, that is nothing: a StopIteration."""
    edges = [EDGES[0], Edge(2, 0, None, 1, 0, per="step")]
    assert run("0S2 0F0 0S0.0\n1B0 1R2 1R0.0 1F0", edges).stuck == (
        Stuck(0, 0, (Task(Kind.RECV, 1, edge=2),)),
        Stuck(1, 0, (Task(Kind.F, 1, 0),)),
    )
    assert run("0S2 0F0 0S0.0\n1B0", edges).stuck[0] == Stuck(0, 0, ())


@pytest.mark.parametrize("kind", params(SCHEDULES, ["v_min", "v_half", "zb_h1", "interleaved_1f1b"]))
def test_no_task_is_looked_at_more_often_where_there_are_many(kind: str) -> None:
    """Calls of functions per task, from the order to the simulated step; of 32 stages beside those of 8."""
    few, many = calls_per_task(kind, 8), calls_per_task(kind, 32)
    for part, calls in many.items():
        # Of more stages a larger share are in the middle, where there are more transfers.
        assert calls < 1.05 * few[part], (part, calls, few[part])
        # It was 84 to check and 50 to simulate a task when ranks were tried in turns.
        assert calls < {"order": 15, "transfers": 25, "check": 30, "simulate": 25, "pairs": 60, "one host": 60}[part], (
            part,
            calls,
        )


def calls_per_task(kind: str, stages: int) -> dict[str, float]:
    counted = itertools.count()
    marks = [0]

    def mark() -> None:
        marks.append(next(counted))

    def count(frame: Any, event: str, arg: Any) -> None:
        if event in ("call", "c_call"):
            next(counted)

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        order = build(kind, stages, 64)
        mark()
        up = [Edge(n, n, 0, n + 1, 0) for n in range(order.chunks - 1)]
        edges = [*up, *(Edge(1000 + n, n + 1, 1, n, 1) for n in range(order.chunks - 1))]
        program = add_transfers(order, edges)
        mark()
        check(program, edges)
        mark()
        assert simulate(program, edges=edges).step_time > 0
        mark()
        pairs = Sharing(tuple(rank // 2 for rank in range(stages)), 0.8, 0.6)
        assert simulate_on_hosts(program, ChunkTimes(), edges, pairs).step_time > 0
        mark()
        assert simulate_on_hosts(program, ChunkTimes(), edges, Sharing((0,) * stages, 0.8, 0.6)).step_time > 0
        mark()
    finally:
        sys.setprofile(before)
    tasks = sum(map(len, program.ranks))
    parts = ("order", "transfers", "check", "simulate", "pairs", "one host")
    return {part: (end - begin) / tasks for part, (begin, end) in zip(parts, itertools.pairwise(marks), strict=True)}


def test_a_stray_task_hides_none_that_is_needed() -> None:
    stray = "0F0 0S0.0 0R1.0 0B0\n1R0.0 1F0 1B0 1S1.0 1S0.0"
    assert [(stuck.rank, stuck.position) for stuck in run(stray, EDGES).stuck] == [(1, 4)]
    assert not run("0F0 0B0 0I0 0W0").stuck


def test_a_fork_meanwhile_collects_garbage() -> None:
    with collection_put_off():
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_garbage_is_collected_again_when_a_program_is_made_or_refused() -> None:
    """And not meanwhile: a million objects that stay were looked at again and again."""
    seen = []

    class Looking(Program):
        def placement(self) -> tuple[int, ...]:
            seen.append(gc.isenabled())
            return super().placement()

    ranks = build("interleaved", 2, 2).ranks
    check(Looking(ranks, 2, 2, 2))
    assert seen
    assert not any(seen)
    assert gc.isenabled()
    with pytest.raises(ProgramError):
        check(Looking(ranks, 3, 2, 2))
    assert gc.isenabled()
    gc.disable()
    try:
        check(Looking(ranks, 2, 2, 2))
        assert not gc.isenabled()
    finally:
        gc.enable()
