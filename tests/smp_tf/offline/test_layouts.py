"""Where the weights, gradients and slots of a plan would be, by what the configuration shares."""

from __future__ import annotations

from typing import Any

import pytest
import tf_keras
from tf_keras import layers

from smp_tf.config.config import check_config
from smp_tf.offline.layouts import layouts_of
from smp_tf.offline.plan import OfflineModel, offline
from smp_tf.partition.layout import Layout
from smp_tf.partition.spread import EVERYWHERE, Partial, SplitOver, Spread, Whole

KERNEL, BIAS = "d0/kernel", "d0/bias"
#: The kernel is so large that its slots are cut into rows; the bias goes whole to the first replica.
ROWS, WHOLE = SplitOver("D", 0, (0, 256, 512), keeper=1), Whole("D", 0, 2)


@pytest.fixture(scope="module")
def model() -> Any:
    def build() -> tf_keras.Model:
        return tf_keras.Sequential([tf_keras.Input((512,)), layers.Dense(512, name="d0")], name="one")

    with offline():
        yield OfflineModel(build, batch_size=8, optimizer="adam")


@pytest.mark.parametrize(
    ("replicas", "config", "gradients", "slots"),
    [
        (1, {"shard_optimizer_state": True}, (EVERYWHERE, EVERYWHERE), (EVERYWHERE, EVERYWHERE)),
        (2, {}, (EVERYWHERE, EVERYWHERE), (EVERYWHERE, EVERYWHERE)),
        (2, {"shard_optimizer_state": True}, (EVERYWHERE, WHOLE), (ROWS, WHOLE)),
        # All replicas get all averages: on the host they are summed in equal parts.
        (2, {"optimizer_offload": True}, (EVERYWHERE, EVERYWHERE), (ROWS, WHOLE)),
        (2, {"gradient_compression": "1bit"}, (Partial("D"), Partial("D")), (EVERYWHERE, EVERYWHERE)),
    ],
)
def test_layouts_of_a_plan(
    replicas: int, config: dict[str, Any], gradients: tuple[Spread, ...], slots: tuple[Spread, ...], model: Any
) -> None:
    wanted = check_config({"partitions": 1, "microbatches": 2, **config}, "a test")
    found = layouts_of(model.plan(wanted, replicas=replicas), wanted)
    assert found == {
        name: Layout(0, 0, gradient=gradient, slots=of_it)
        for name, gradient, of_it in zip((KERNEL, BIAS), gradients, slots, strict=True)
    }
