"""Slots that follow a weight to replicas which share them: each takes its part, and reads all that is sent."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from smp_tf.keras import optimizer_slots
from smp_tf.partition.spread import EVERYWHERE, SplitOver, Spread, Whole
from smp_tf.sharding import layouts, moved_slots
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
    ("slots", "wanted"),
    [
        (EVERYWHERE, MOMENTUMS),
        (SplitOver("D", 0, (0, 1, 3, 4)), MOMENTUMS[1:3]),
        (Whole("D", 0, 3), None),
        (SplitOver("D", 0, (0, 4, 4, 4)), None),
    ],
)
def test_a_replica_takes_its_share_of_slots_that_come_whole(
    slots: Spread, wanted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a replica without a share ended with KeyError: 'momentums'."""
    optimizer = tf_keras.optimizers.Adam()
    main, head = tf.Variable([[1.0]], name="main"), tf.Variable(tf.zeros([4, 2]), name="head")
    optimizer.build([main])
    moved_slots.note_use(optimizer)
    sent = Sent(moved_slots._number_of[optimizer])
    monkeypatch.setattr(fetch, "transport", lambda: sent)
    place = {"P": 0, "D": 1, "T": 0}
    rows = slots.rows_at(place)
    monkeypatch.setattr(layouts, "slots_of", lambda variable, optimizer: slots)
    monkeypatch.setattr(layouts, "here", lambda: place)
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
