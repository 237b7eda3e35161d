"""The building blocks of the orders in a V."""

from __future__ import annotations

import pytest

from smp_tf.pipeline.schedules import v_orders
from smp_tf.pipeline.schedules.placements import in_a_v
from smp_tf.pipeline.task import Kind


def test_the_block_that_is_drawn() -> None:
    slots = v_orders._block(4, (1, 1, 1, 1), (0, 0, 0))
    rows = [[".."] * 16 for _ in range(4)]
    for (kind, chunk), slot in slots.items():
        rows[in_a_v(4)[chunk]][slot] = f"{kind.word}{chunk}"
    assert v_orders.__doc__ is not None
    for rank, row in enumerate(rows):
        assert f"rank {rank}  {' '.join(row)}" in v_orders.__doc__


@pytest.mark.parametrize("stages", range(1, 17))
@pytest.mark.parametrize("block", [((3, 3, 3, 3), (0, 0, 0)), ((2, 1, 2, 1), (2, 1, 1)), ((1, 1, 1, 1), (0, 0, 0))])
def test_blocks_six_slots_apart_do_not_overlap(
    stages: int, block: tuple[tuple[int, int, int, int], tuple[int, int, int]]
) -> None:
    slots = v_orders._block(stages, *block)
    way = [(Kind.F, chunk) for chunk in range(2 * stages)] + [(Kind.I, chunk) for chunk in reversed(range(2 * stages))]
    assert sorted(slots, key=slots.__getitem__) == way
    for rank in range(stages):
        own = [slot % 6 for (_, chunk), slot in slots.items() if in_a_v(stages)[chunk] == rank]
        assert len(set(own)) == 4


@pytest.mark.parametrize("stages", [1, 2, 4, 5, 7, 8])
def test_a_block_keeps_as_much_on_every_rank(stages: int) -> None:
    """From the F to the I of a chunk, of both chunks together: 4 slots per stage in V-min."""
    slots = v_orders._block(stages, (1, 1, 1, 1), (0, 0, 0))
    for rank in range(stages):
        own = [chunk for chunk, at in enumerate(in_a_v(stages)) if at == rank]
        assert sum(slots[Kind.I, chunk] - slots[Kind.F, chunk] for chunk in own) == 4 * stages
