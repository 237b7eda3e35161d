"""What stages hold at the fullest moment of a step, on dense layers with tensors of 128 bytes."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest

from smp_tf.partition.op_graph import OpGraph
from smp_tf.pipeline.simulate import ChunkTimes
from smp_tf.pipeline.stage_program import edges_of, plan_program
from smp_tf.pipeline.step_memory import StepMemory, step_memory
from smp_tf.planning import PlacementRequest, cut
from smp_tf.proposal import propose
from tests.partition.op_graph_builder import chain_of_dense


def held(schedule: str, microbatches: int, graph: OpGraph | None = None) -> tuple[StepMemory, ...]:
    graph = graph or chain_of_dense(4)
    request = PlacementRequest(2, microbatches, schedule, "memory", 0.0)
    done = cut(graph, propose(graph, request, {}))
    return step_memory(done, plan_program(done, schedule, microbatches), edges_of(done), [ChunkTimes()] * 2)


@pytest.mark.parametrize(
    ("schedule", "microbatches", "expected"),
    [
        ("simple", 2, (StepMemory(512, 136, 512), StepMemory(768, 8, 512))),
        ("simple", 4, (StepMemory(1024, 144, 512), StepMemory(1536, 16, 512))),
        ("interleaved", 4, (StepMemory(512, 144, 512), StepMemory(384, 132, 512))),
        ("interleaved", 8, (StepMemory(512, 160, 512), StepMemory(384, 132, 512))),
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
        importlib.import_module("smp_tf.pipeline.step_memory"),
        "working_set",
        lambda graph, segment, *rest: 10_000 if segment.sweep == 0 else 0,
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
