"""Plans that send little for a little balance, of whole models; and the best balance, where nothing is given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

from smp_tf.config.config import check_config
from smp_tf.offline.plan import OfflineModel, OfflinePlan, offline
from tests.distributed import models


def planned(function: Callable[[], Any], batch_size: int, **config: Any) -> OfflinePlan:
    with offline():
        model = OfflineModel(function, batch_size=batch_size)
        return model.plan(check_config({"microbatches": 4, **config}, "a test"), proof_seconds=0.0)


def blocks(count: int, width: int, length: int, heads: int) -> Callable[[], Any]:
    """A GPT of so many blocks, with an output layer of its own."""

    class GPT(tf_keras.Model):
        def __init__(self) -> None:
            super().__init__(name="gpt")
            self.table = layers.Embedding(4 * width, width)
            self.blocks = [models.Block(width, heads) for _ in range(count)]
            self.norm = layers.LayerNormalization()
            self.head = layers.Dense(4 * width)

        def call(self, tokens: tf.Tensor) -> tf.Tensor:
            x = self.table(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    return lambda: (GPT(), tf.TensorSpec([32, length], tf.int32))


def blocks_of(made: OfflinePlan) -> list[set[str]]:
    """The blocks that each chunk has layers of."""
    found: list[set[str]] = [set() for _ in made.plan.placement]
    for name, chunk in made.plan.units.items():
        found[chunk] |= {part for part in name.split("/") if part.startswith("block")}
    return found


def require_whole_blocks(made: OfflinePlan) -> None:
    """Checks that no block is in two chunks."""
    chunks = blocks_of(made)
    assert sum(map(len, chunks)) == len(set().union(*chunks)), chunks


@pytest.mark.full
@pytest.mark.large
@pytest.mark.parametrize("pipeline", ["interleaved", "zb_v"])
def test_a_gpt_is_cut_between_its_blocks(pipeline: str) -> None:
    made = planned(blocks(24, 1024, 256, 16), 32, partitions=4, microbatches=8, pipeline=pipeline)
    require_whole_blocks(made)
    assert made.plan.trade is not None
    activation = 4 * 4 * 256 * 1024
    crossings = len(made.plan.placement) - 1 - (pipeline == "zb_v")
    assert made.plan.trade.taken.sent == 2 * crossings * activation


def test_a_small_gpt_is_cut_between_its_blocks() -> None:
    made = planned(blocks(8, 32, 16, 2), 32, partitions=2, balance_tolerance=0.1)
    require_whole_blocks(made)
