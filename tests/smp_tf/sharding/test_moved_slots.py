"""Slots that follow a weight to replicas which share them: each takes its part, and reads all that is sent."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from smp_tf.keras import optimizer_slots
from smp_tf.sharding import moved_slots, shares
from smp_tf.variables import fetch

KEEPER = 1
MOMENTUMS, VELOCITIES = np.arange(8.0, dtype=np.float32).reshape(4, 2), np.ones([4, 2], np.float32)


class Sent:
    """What the keeper has sent."""

    def __init__(self, number: int) -> None:
        names = [[number, ["momentums", "velocities"]]]
        self.left = [json.dumps(names).encode(), MOMENTUMS.tobytes(), VELOCITIES.tobytes()]

    def recv_bytes(self, source: int, tag: int) -> memoryview:
        assert source == KEEPER
        return memoryview(self.left.pop(0))


@pytest.mark.parametrize(
    ("rows", "is_elsewhere", "wanted"),
    [
        (None, False, MOMENTUMS),
        ((1, 3), False, MOMENTUMS[1:3]),
        (None, True, None),
        ((4, 4), True, None),
    ],
)
def test_a_replica_takes_its_share_of_slots_that_come_whole(
    rows: Any, is_elsewhere: bool, wanted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a replica without a share ended with KeyError: 'momentums'."""
    optimizer = tf_keras.optimizers.Adam()
    main, head = tf.Variable([[1.0]], name="main"), tf.Variable(tf.zeros([4, 2]), name="head")
    optimizer.build([main])
    moved_slots.note_use(optimizer)
    sent = Sent(moved_slots._number_of[optimizer])
    monkeypatch.setattr(fetch, "transport", lambda: sent)
    monkeypatch.setattr(shares, "rows_here", lambda variable, optimizer: rows)
    monkeypatch.setattr(shares, "is_updated_elsewhere", lambda variable, optimizer: is_elsewhere)
    build = type(optimizer).build

    def of_rows(self: Any, weights: Any) -> None:
        """As `row_blocks` has it: the block counts as the weight."""
        blocks = []
        for weight in weights:
            block = tf.Variable(weight[rows[0] : rows[1]] if rows else weight, name=weight.name.partition(":")[0])
            block._unique_id = weight._unique_id
            blocks.append(block)
        build(self, blocks)

    monkeypatch.setattr(type(optimizer), "build", of_rows)
    moved_slots.receive(head, KEEPER)
    assert sent.left == []
    found = {name: slot.numpy() for _, name, slot in optimizer_slots.slots(optimizer, [head])}
    assert optimizer_slots.count_of_variables(optimizer) == (1 if wanted is None else 2)
    if wanted is None:
        assert found == {}
    else:
        np.testing.assert_array_equal(found["momentums"], wanted)
        assert found["velocities"].shape == wanted.shape
