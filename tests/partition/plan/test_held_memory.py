"""What a rank held in an earlier training takes the place of what is estimated."""

from __future__ import annotations

import pytest

from smp_tf.partition.plan.held_memory import HeldMemory, as_held
from smp_tf.partition.plan.stage_forecast import Memory, Source, StageForecast, Traffic, Use

#: 1,000 bytes on the device.
ROW = StageForecast(
    2,
    128,
    Memory({Use.WEIGHTS: 300, Use.GRADIENTS: 100, Use.SLOTS: 200, Use.STASH: 150, Use.TRANSPORT: 50, Use.WORK: 200}),
    2,
    0.5,
    Traffic(),
)


@pytest.mark.parametrize(
    ("held", "stash", "transport", "work"),
    [
        (1200, 150, 50, 400),  # more: with what comes and goes within a task
        (900, 150, 50, 100),  # less
        (770, 150, 20, 0),
        (700, 100, 0, 0),
        (500, 0, 0, 0),  # less than weights, gradients and slots, which are known by their sizes
    ],
)
def test_a_stage_holds_what_it_held(held: int, stash: int, transport: int, work: int) -> None:
    found = as_held(ROW, HeldMemory(held, 200, 0, 1000))
    assert found.memory.uses == {
        Use.WEIGHTS: 300,
        Use.GRADIENTS: 100,
        Use.SLOTS: 200,
        Use.STASH: stash,
        Use.TRANSPORT: transport,
        Use.WORK: work,
    }
    assert found.device_bytes == max(held, 600)
    assert found.source == "as measured"


def test_the_slots_are_those_of_the_training_and_small_tensors_come_on_top() -> None:
    found = as_held(ROW, HeldMemory(800, 50, 70, 1000))
    assert (found.slot_bytes, found.device_bytes) == (50, 870)
    assert as_held(ROW, HeldMemory(800, 50, 70, 1000), counted_only=True).device_bytes == 800


def test_the_memory_of_a_process_is_no_forecast_of_tensors() -> None:
    assert as_held(ROW, HeldMemory(90_000, 50, 0, 1000, is_resident=True)) == ROW
    assert ROW.source == Source.ESTIMATE
