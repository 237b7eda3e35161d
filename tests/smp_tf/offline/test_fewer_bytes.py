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
def test_a_gpt_is_cut_where_one_activation_passes(pipeline: str) -> None:
    """Between two blocks, or between the attention and the small network of one."""
    made = planned(blocks(24, 1024, 256, 16), 32, partitions=4, microbatches=8, pipeline=pipeline)
    assert made.plan.trade is not None
    activation = 4 * 4 * 256 * 1024
    crossings = len(made.plan.placement) - 1 - (pipeline == "zb_v")
    assert made.plan.trade.taken.sent == 2 * crossings * activation


def test_a_small_gpt_is_cut_between_its_blocks() -> None:
    made = planned(blocks(8, 32, 16, 2), 32, partitions=2, balance_tolerance=0.1)
    require_whole_blocks(made)


def image_net() -> tf_keras.Model:
    """A small network with residual connections."""
    image = tf_keras.Input((32, 32, 3))
    x = layers.Conv2D(16, 3, padding="same", activation="relu")(image)
    for number in range(6):
        channels, strides = 16 << (number // 2), 1 + number % 2
        y = layers.Conv2D(channels, 3, strides=strides, padding="same", activation="relu")(x)
        y = layers.Conv2D(channels, 3, padding="same")(y)
        x = layers.Conv2D(channels, 1, strides=strides)(x) + y
    x = layers.GlobalAveragePooling2D()(x)
    return tf_keras.Model(image, layers.Dense(10)(x), name="image_net")


#: Settings, and the first units of all chunks but the first, as they were before fewer bytes were searched for.
BALANCED: dict[str, tuple[Callable[[], Any], list[tuple[dict[str, Any], list[int]]]]] = {
    "gpt": (
        blocks(8, 32, 16, 2),
        [
            ({"partitions": 2}, [38]),
            ({"partitions": 2, "optimize": "speed"}, [51]),
            ({"partitions": 4}, [13, 34, 59]),
            ({"partitions": 4, "optimize": "speed"}, [26, 51, 76]),
            ({"partitions": 2, "pipeline": "zb_v"}, [12, 34, 58]),
            ({"partitions": 3, "contiguous": False}, [23, 50]),
        ],
    ),
    "image net": (
        image_net,
        [
            ({"partitions": 2}, [9]),
            ({"partitions": 2, "optimize": "speed"}, [10]),
            ({"partitions": 4}, [1, 5, 13]),
            ({"partitions": 4, "optimize": "speed"}, [3, 9, 16]),
            ({"partitions": 2, "pipeline": "zb_v", "optimize": "speed"}, [2, 5, 14]),
            ({"partitions": 2, "pipeline": "interleaved_1f1b"}, [4, 9, 12]),
        ],
    ),
}


@pytest.mark.parametrize(("function", "asked"), BALANCED.values(), ids=BALANCED.keys())
def test_with_a_tolerance_of_0_the_best_balance_is_taken(
    function: Callable[[], Any], asked: list[tuple[dict[str, Any], list[int]]]
) -> None:
    with offline():
        model = OfflineModel(function, batch_size=32)
        for settings, wanted in asked:
            config = check_config({"microbatches": 4, "balance_tolerance": 0.0, **settings}, "a test")
            plan = model.plan(config, proof_seconds=0.0).plan
            chunks = list(plan.units.values())
            assert [chunks.index(chunk) for chunk in range(1, max(chunks) + 1)] == wanted, settings
            assert plan.trade is None
