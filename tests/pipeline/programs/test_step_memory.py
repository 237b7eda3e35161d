"""What stages hold at the fullest moment of a step, on dense layers with tensors of 128 bytes."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest

from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.split.split import Split
from smp_tf.partition.split.working_set import Most, SegmentMemory
from smp_tf.pipeline.planner.cut import cut
from smp_tf.pipeline.planner.proposal import propose
from smp_tf.pipeline.planner.request import Aim, Course, PlacementRequest, Storage
from smp_tf.pipeline.programs.chunk_times import ChunkTimes
from smp_tf.pipeline.programs.simulate import simulate
from smp_tf.pipeline.programs.step_memory import StepMemory, memory_over_step, step_memory
from smp_tf.pipeline.run.step_tasks import edges_of, plan_program
from tests.partition.op_graph_builder import chain_of_dense


def cut_in_two(schedule: str, microbatches: int, graph: OpGraph | None = None) -> Split:
    graph = graph or chain_of_dense(4)
    request = PlacementRequest(Course(schedule, 2, microbatches), Storage(0.0), Aim("memory"))
    return cut(graph, propose(graph, request, {}))


def held(schedule: str, microbatches: int, graph: OpGraph | None = None) -> tuple[StepMemory, ...]:
    done = cut_in_two(schedule, microbatches, graph)
    return step_memory(done, plan_program(done, schedule, microbatches), edges_of(done), [[ChunkTimes()] * 2])[0]


@pytest.mark.parametrize(
    ("schedule", "microbatches", "expected"),
    [
        ("simple", 2, (StepMemory(512, 136, 768), StepMemory(768, 8, 768))),
        ("simple", 4, (StepMemory(1024, 144, 768), StepMemory(1536, 16, 768))),
        ("interleaved", 4, (StepMemory(512, 144, 768), StepMemory(384, 132, 768))),
        ("interleaved", 8, (StepMemory(512, 160, 768), StepMemory(384, 132, 768))),
    ],
)
def test_the_stash_grows_with_the_microbatches_where_the_schedule_lets_it(
    schedule: str, microbatches: int, expected: tuple[StepMemory, StepMemory]
) -> None:
    """The first stage stashes two tensors a microbatch (the input is the batch's), the last what it received, too."""
    assert held(schedule, microbatches) == expected


def test_nothing_is_computed_while_a_tensor_is_sent_or_received(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers were counted as forward passes: under the stash of all microbatches, one more of them."""
    monkeypatch.setattr(
        importlib.import_module("smp_tf.pipeline.programs.step_memory"),
        "segment_memory",
        lambda graph, segment, *rest: SegmentMemory(Most(10_000 if segment.sweep == 0 else 0, 0), Most(0, 0)),
    )
    # The last forward pass has the stash of those before it beside it.
    assert held("simple", 4)[0] == StepMemory(1024, 8, 768 - 1024 + 10_000)


@pytest.mark.parametrize(("schedule", "microbatches", "more"), [("simple", 1, 256), ("simple", 4, 0)])
def test_what_another_stage_adds_to_a_gradient_is_there_in_the_last_task(
    schedule: str, microbatches: int, more: int
) -> None:
    """It was received behind that task, when all else is gone. Of one microbatch the last task is the fullest."""
    graphs = [chain_of_dense(4, tied=tied, stages=(0, 0, 1, 1)) for tied in (None, (0, 3))]
    # As a step returns them.
    gradients = [[tensor for gradient in graph.gradients for tensor in gradient.tensors] for graph in graphs]
    alone, tied = (
        held(schedule, microbatches, replace(graph, outputs=(*graph.outputs, *returned)))
        for graph, returned in zip(graphs, gradients, strict=True)
    )
    assert tied[0] == replace(alone[0], transport=alone[0].transport + more)


def test_what_is_held_from_moment_to_moment() -> None:
    """Forward passes take 1 s and backward passes 2: the second stage waits for the first, and the first for it."""
    done = cut_in_two("simple", 2)
    timeline = simulate(plan_program(done, "simple", 2), [ChunkTimes()] * 2, edges_of(done))
    over_time = memory_over_step(done, timeline)
    first, last = (
        [f"{at:g}: {one.stash} {one.transport} {one.working}" for at, one in moments] for moments in over_time
    )
    assert first == [
        "0: 0 0 256",  # F of 0
        "1: 256 0 0",
        "1: 256 0 256",  # F of 1
        "2: 512 4 0",
        "5: 512 136 768",  # B of 0, when the gradient of 1 is on its way
        "7: 256 136 0",
        "7: 256 136 768",  # B of 1
        "9: 0 8 0",  # the losses
    ]
    assert last == [
        "1: 128 0 260",
        "2: 512 4 0",  # what it received for 1 is stash as soon as it is read
        "2: 512 4 260",
        "3: 768 8 0",
        "3: 768 8 768",
        "5: 384 8 0",
        "5: 384 8 768",
        "7: 0 8 0",
    ]
    fullest, _ = step_memory(done, plan_program(done, "simple", 2), edges_of(done), [[ChunkTimes()] * 2])
    assert [max(one.total for _, one in moments) for moments in over_time] == [one.total for one in fullest]


def test_large_tensors_are_counted_alone_where_that_is_asked_for() -> None:
    """From 129 bytes on: activations of 128 bytes and losses are left out; two gradients of 256 bytes are not."""
    done = cut_in_two("simple", 2)
    given = done, plan_program(done, "simple", 2), edges_of(done), [[ChunkTimes()] * 2]
    all_of_them, large = step_memory(*given, least=129)
    assert all_of_them == held("simple", 2)
    assert large == (StepMemory(0, 0, 512), StepMemory(0, 0, 512))
    assert step_memory(*given, least=0) == (all_of_them, all_of_them)
    assert step_memory(*given)[1] == ()
