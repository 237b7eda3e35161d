"""What a `train_step` makes of its gradients runs once per batch, on those of the whole batch, as in plain Keras."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import smp_tf as smp
from smp_tf.whole_batch import batch_results
from smp_tf.whole_batch.batch_results import BatchResults
from tests.full_only import params
from tests.smp_tf.whole_batch.own_gradients import USES, Uses, compare

pytestmark = pytest.mark.large

#: How often stages tell each other what is made of gradients, were each weight on another stage.
ROUNDS = {
    "clipped_and_logged": 2,
    "logged": 1,
    "clipped_by_value": 0,
    "scaled_by_the_loss": 0,
    "adaptive": 0,
    "in_two_rounds": 2,
    "signed_roots": 0,
    "of_all_in_a_row": 1,
}


@pytest.mark.parametrize(
    "use", params(list(USES), [use for use in USES if use not in ("scaled_by_the_loss", "logged")])
)
def test_what_is_made_of_gradients_is_made_of_those_of_the_batch(
    init: Callable[..., None], use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    init(microbatches=4)
    rounds, counted = [], BatchResults.rounds_of_telling

    def noted(results: BatchResults, applies: Any) -> int:
        rounds.append(counted(results, applies))
        return rounds[-1]

    monkeypatch.setattr(BatchResults, "rounds_of_telling", noted)
    assert compare(USES[use]) < 1e-12
    assert set(rounds) == {ROUNDS[use]}


@pytest.mark.full
@pytest.mark.parametrize("microbatches", [1, 2, 3, 8])
def test_that_is_so_for_any_number_of_microbatches(init: Callable[..., None], microbatches: int) -> None:
    init(microbatches=microbatches)
    assert compare(USES["clipped_and_logged"]) < 1e-12


def test_a_state_of_gradients_is_kept_once_per_batch(init: Callable[..., None]) -> None:
    """A moving average of the norm, by which gradients are clipped: what automatic clipping does."""
    init(microbatches=4)

    def by_history(gradients: Sequence[Any], weights: Sequence[Any], loss: Any, average: Any) -> Any:
        norm = tf.linalg.global_norm(gradients)
        average.assign(0.9 * average + 0.1 * norm)
        return [g * tf.minimum(tf.ones_like(norm), average / norm) for g in gradients], {
            "average": average.read_value()
        }

    assert compare(by_history) < 1e-12


def test_gradients_are_added_up_in_a_state_once_per_batch(init: Callable[..., None]) -> None:
    """Nothing in that is not linear. Yet a counter of batches, and what is applied by it, counts batches."""
    init(microbatches=4)
    sums: list[tf.Variable] = []

    def accumulated(gradients: Sequence[Any], weights: Sequence[Any], loss: Any, count: Any) -> Any:
        with tf.init_scope():
            for weight in weights[len(sums) :]:
                sums.append(tf.Variable(tf.zeros(weight.shape, tf.float64), trainable=False))
        count.assign_add(1.0)
        is_second = tf.cast(tf.equal(tf.math.floormod(tf.round(count), 2.0), 0.0), tf.float64)
        for kept, gradient in zip(sums, gradients, strict=True):
            kept.assign_add(gradient)
        applied = [is_second * kept / 2.0 for kept in sums]
        for kept in sums:
            kept.assign(kept * (1.0 - is_second))
        return applied, {"count": count.read_value()}

    assert compare(accumulated) < 1e-12


def test_much_that_stages_tell_each_other_is_said_once(
    init: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    init(microbatches=2)
    monkeypatch.setattr(batch_results, "_MANY_BYTES", 8)
    compare(USES["logged"])
    assert capfd.readouterr().err.count("MiB of them to every stage. A norm is told in a few bytes") == 1


def test_one_of_two_optimizers_may_clip(init: Callable[..., None]) -> None:
    init(microbatches=3)
    found = []

    def make(base: type) -> Any:
        class Two(base):  # type: ignore[misc, valid-type]
            def __init__(self) -> None:
                super().__init__(name="two")
                self.body, self.head = tf_keras.layers.Dense(4), tf_keras.layers.Dense(3)
                self.other = tf_keras.optimizers.Adam(0.01)

            def call(self, x: Any) -> Any:
                return self.head(self.body(x))

            def train_step(self, data: Any) -> Any:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(data[1] - self(data[0], training=True)))
                body, head = self.body.trainable_variables, self.head.trainable_variables
                gradients = tape.gradient(loss, body + head)
                clipped = [tf.clip_by_norm(g, 0.05) for g in gradients[: len(body)]]
                self.other.apply_gradients(zip(clipped, body, strict=True))
                self.optimizer.apply_gradients(zip(gradients[len(body) :], head, strict=True))
                return {"loss": loss}

        return Two()

    weights = Uses.weights(((6, 4), (4,), (4, 3), (3,)))
    for base in (tf_keras.Model, smp.DistributedModel):
        model = make(base)
        model.build((None, 6))
        model.set_weights(weights)
        model.compile(tf_keras.optimizers.SGD(0.1))
        model.fit(Uses.X, Uses.Y, batch_size=21, epochs=2, shuffle=False, verbose=0)
        found.append(model.get_weights())
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)
