"""Keys are paths of attributes: the same before and after a step, and for any number of partitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.checkpoint.survey import StateKind, survey, variable_of_slot
from smp_tf.keras import optimizer_slots
from smp_tf.partition.spread import EVERYWHERE, SplitOver
from smp_tf.sharding import layouts
from tests.smp_tf.variables.test_store import settle

X = np.ones([4, 3], np.float32)


class Net(smp.DistributedModel):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = [layers.Dense(4, use_bias=False), layers.BatchNormalization(center=False, scale=False)]
        self.by_name = {"a.b/c": layers.Dense(3, use_bias=False)}
        self.again = self.blocks[0]
        self.seen = tf_keras.metrics.Sum()

    def call(self, x: tf.Tensor) -> tf.Tensor:
        for layer in self.blocks:
            x = layer(x)
        return self.by_name["a.b/c"](x)


def stepped(model: smp.DistributedModel, optimizer: Any) -> None:
    @smp.step
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    optimizer.apply_gradients(zip([g.accumulate() for g in step(X)], model.trainable_variables, strict=True))


def kinds(root: Any) -> dict[str, str]:
    return {key: item.kind.value for key, item in survey(root).items.items()}


def test_keys_of_a_training(init: Callable[..., None]) -> None:
    init(microbatches=2)
    model, optimizer = Net(), tf_keras.optimizers.SGD(0.1, momentum=0.9)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, best=tf.Variable(1.0), more=[tf.Variable(2)])
    before = survey(checkpoint)
    assert before.unfinished == ["model"]
    assert before.waiting == ["optimizer"]
    assert (before.has_models, before.optimizers) == (True, {"optimizer": False})
    stepped(model, optimizer)
    after = survey(checkpoint)
    assert kinds(checkpoint) == {
        "best": "script",
        "more/0": "script",
        "optimizer/_iterations": "optimizer",
        "optimizer/_learning_rate": "optimizer",
        "model/seen/total": "script",
        # The shorter of two paths, not the one that was set first.
        "model/again/kernel": "model",
        "model/blocks/1/moving_mean": "model",
        "model/blocks/1/moving_variance": "model",
        "model/by_name/a..b.Sc/kernel": "model",
        "model/again/kernel/.OPTIMIZER_SLOT/optimizer/momentums": "slot",
        "model/by_name/a..b.Sc/kernel/.OPTIMIZER_SLOT/optimizer/momentums": "slot",
    }
    assert (after.unfinished, after.waiting, after.optimizers, after.orphans) == ([], [], {"optimizer": True}, [])
    slot = after.items["model/again/kernel/.OPTIMIZER_SLOT/optimizer/momentums"]
    assert slot.target is optimizer.momentums[0]
    assert (slot.stage, slot.optimizer) == (0, "optimizer")


def test_keys_around_a_root_do_not_show_a_private_name(init: Callable[..., None]) -> None:
    init(microbatches=2)
    root = tf.Module()
    root.value = tf.Variable(1.0)
    assert list(kinds(tf.train.Checkpoint(root))) == ["root/value"]


def test_a_model_built_before_it_was_wrapped_is_not_everybodys(init: Callable[..., None]) -> None:
    init(microbatches=2)
    model = smp.DistributedModel(tf_keras.Sequential([layers.Input((3,)), layers.Dense(2, use_bias=False)]))
    checkpoint = tf.train.Checkpoint(model=model)
    [item] = survey(checkpoint).items.values()
    assert (item.kind, item.is_here, item.stage) == (StateKind.MODEL, False, None)
    stepped(model, tf_keras.optimizers.SGD())
    [item] = survey(checkpoint).items.values()
    assert (item.kind, item.is_here, item.stage) == (StateKind.MODEL, True, 0)


def test_what_another_rank_stores_is_not_here(init: Callable[..., None], two_partitions: Callable[[], None]) -> None:
    init(microbatches=2)
    model = smp.DistributedModel(lambda: tf_keras.Sequential([layers.Dense(4), layers.Dense(2)]))
    model.build((None, 3))
    two_partitions()
    settle(model._smp_store, {2: 1, 3: 1}, 0, 1)
    found = {
        key.rpartition("model/wrapped/")[2]: i for key, i in survey(tf.train.Checkpoint(model=model)).items.items()
    }
    assert {key: (item.stage, item.is_here) for key, item in found.items()} == {
        "layer_with_weights-0/kernel": (0, True),
        "layer_with_weights-0/bias": (0, True),
        "layer_with_weights-1/kernel": (1, False),
        "layer_with_weights-1/bias": (1, False),
    }


def test_objects_with_state_of_their_own() -> None:
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
    checkpoint = tf.train.Checkpoint(table=table, generator=tf.random.Generator.from_seed(1))
    assert kinds(checkpoint) == {
        "table/.ATTRIBUTES/-keys": "state",
        "table/.ATTRIBUTES/-values": "state",
        "generator/_state_var": "script",
    }


def test_variables_of_mixed_precision_layers_are_their_own(init: Callable[..., None]) -> None:
    init(microbatches=2)
    tf_keras.mixed_precision.set_global_policy("mixed_bfloat16")
    model = smp.DistributedModel(lambda: tf_keras.Sequential([layers.Dense(2, use_bias=False)]))
    optimizer = tf_keras.optimizers.Adam()
    stepped(model, optimizer)
    found = survey(tf.train.Checkpoint(model=model, optimizer=optimizer))
    key = "model/wrapped/layer_with_weights-0/kernel"
    assert found.items[key].target.dtype == tf.float32
    assert f"{key}/.OPTIMIZER_SLOT/optimizer/momentums" in found.items


def test_slots_of_variables_that_cannot_be_reached_are_counted(init: Callable[..., None]) -> None:
    init(microbatches=2)
    model, optimizer = Net(), tf_keras.optimizers.Adam()
    stepped(model, optimizer)
    assert survey(tf.train.Checkpoint(optimizer=optimizer)).orphans == [("optimizer", 2)]


def test_slots_of_a_weight_that_is_cut_are_of_rows(init: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    init(microbatches=2)
    model, optimizer = Net(), tf_keras.optimizers.SGD(0.1, momentum=0.9)
    stepped(model, optimizer)
    cut, whole = model.again.kernel, model.by_name["a.b/c"].kernel
    slots = [
        (cut, "momentum", tf.Variable(tf.zeros([2, 4]))),
        (cut, "scale", tf.Variable(1.0)),
        (whole, "momentum", tf.Variable(tf.zeros([4, 3]))),
    ]
    monkeypatch.setattr(optimizer_slots, "slots", lambda optimizer, variables: slots)
    rows = SplitOver("D", 0, (0, 1, 3))
    monkeypatch.setattr(layouts, "slots_of", lambda variable, optimizer: rows if variable is cut else EVERYWHERE)
    monkeypatch.setattr(layouts, "here", lambda: {"P": 0, "D": 1, "T": 0})
    items = survey(tf.train.Checkpoint(model=model, optimizer=optimizer)).items
    found = {key: i for key, i in items.items() if i.kind is StateKind.SLOT}
    # What is not of the weight's shape is the same on every replica that has it.
    assert {key: (i.rows, i.extent, i.spread) for key, i in found.items()} == {
        "model/again/kernel/.OPTIMIZER_SLOT/optimizer/momentum": ((1, 3), 3, rows),
        "model/again/kernel/.OPTIMIZER_SLOT/optimizer/scale": (None, 0, rows),
        "model/by_name/a..b.Sc/kernel/.OPTIMIZER_SLOT/optimizer/momentum": (None, 0, EVERYWHERE),
    }
    assert [i.whole(i.target.shape).as_list() for i in found.values()] == [[3, 4], [], [4, 3]]


@pytest.mark.parametrize(
    ("key", "variable"),
    [("a/b", "a/b"), ("a/b/.OPTIMIZER_SLOT/opt/momentums", "a/b"), ("opt/_iterations", "opt/_iterations")],
)
def test_the_variable_of_a_slot(key: str, variable: str) -> None:
    assert variable_of_slot(key) == variable
