"""What stages hold at the fullest moment of a step, on dense layers with tensors of 128 bytes."""

from __future__ import annotations

import importlib

import pytest

from smp_tf.pipeline.simulate import ChunkTimes
from smp_tf.pipeline.stage_program import edges_of, plan_program
from smp_tf.pipeline.step_memory import StepMemory, step_memory
from smp_tf.planning import PlacementRequest, cut
from smp_tf.proposal import propose
from tests.partition.op_graph_builder import chain_of_dense


def held(schedule: str, microbatches: int) -> tuple[StepMemory, ...]:
    graph = chain_of_dense(4)
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
