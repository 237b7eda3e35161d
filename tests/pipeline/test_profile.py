"""Units are measured one after the other on what really flows between them, with the weights of one at a time."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import tensorflow as tf
import tf_keras

from smp_tf import planning
from smp_tf.pipeline import profile as profiling
from smp_tf.pipeline.profile import profile
from tests.partition.traced_step import FLOATS, lowered


class Slow(tf_keras.layers.Layer):
    """Multiplies with a matrix of its own many times over."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight("kernel", (8, 8))

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda i, y: i < 2000, lambda i, y: (i + 1, tf.tanh(y @ self.kernel)), (0, x))[1]


class Net(tf_keras.Model):
    def __init__(self) -> None:
        super().__init__(name="net")
        self.first = tf_keras.layers.Dense(8, name="first")
        self.slow = Slow(name="slow")
        self.drop = tf_keras.layers.Dropout(0.5, name="drop")
        self.last = tf_keras.layers.Dense(3, name="last")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.last(self.drop(self.slow(self.first(x)), training=False))


def cut_net() -> tuple[Any, Any, Any]:
    net = Net()
    net(tf.ones([4, 8]))

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(net(x))
        return tape.gradient(loss, net.trainable_variables), loss

    found = lowered(step, FLOATS, models=[net])
    units, done = planning.cut_into_units(planning.prune(found.graph))
    return units, done, found


def test_a_slow_unit_is_seen_to_be_slow_forward_and_backward() -> None:
    units, done, found = cut_net()
    seconds = profile(done, [tf.ones([4, 8])], found.captures, {})
    assert seconds.keys() == done.segments.keys()
    by_name = {unit.name: [seconds.get((unit.index, sweep), 0.0) for sweep in (0, 1)] for unit in units}
    for sweep in (0, 1):
        others = [taken[sweep] for name, taken in by_name.items() if name != "net/slow"]
        assert by_name["net/slow"][sweep] > 5 * max(others), by_name


def test_no_weights_of_two_units_are_there_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, done, found = cut_net()
    original, made, together = profiling._variable, [], []

    def noted(graph: Any, variable: int) -> tf.Variable:
        value = original(graph, variable)
        made.append((graph.variables[variable].name.rpartition("/")[0], weakref.ref(value)))
        gc.collect()
        together.append({owner for owner, reference in made if reference() is not None})
        return value

    monkeypatch.setattr(profiling, "_variable", noted)
    profile(done, [tf.ones([4, 8])], found.captures, {})
    assert {owner for owner, _ in made} >= {"first", "slow", "last"} or len(made) >= 5, made
    assert all(len(owners) == 1 for owners in together), together


def test_the_progress_is_told_to_its_end() -> None:
    _, done, found = cut_net()
    told: list[tuple[int, int]] = []
    profile(done, [tf.ones([4, 8])], found.captures, {}, lambda number, of: told.append((number, of)))
    assert told == [(number + 1, len(done.segments)) for number in range(len(done.segments))]
