"""A model that mixes samples says so, once, before its first step, and says what that means for microbatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from tests.smp_tf.whole_batch.mixing_models import data, fitted, mixing

pytestmark = pytest.mark.large


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What was said of samples that are mixed."""
    return [line for line in capsys.readouterr().err.splitlines() if "mixes samples" in line]


def test_fit_says_which_layer_mixes_samples_and_what_to_do(
    init: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    init(microbatches=4)
    fitted("told_in_fit", 18)
    assert told(capsys) == [
        "smp_tf: train_step of model 'told_in_fit': layer 'told_in_fit/centred' (Centred) mixes samples: op "
        "'told_in_fit/centred/Mean' (Mean) computes one number of several samples. Every microbatch is computed by "
        "itself, here 4 to 5 of 18 samples. So results are not those of one process that computes the whole batch. For "
        'these, train with "microbatches": 1 on one replica, or compute it in the loss, which is that of the whole '
        "batch (docs/sharp_bits.md, 'Layers that mix samples see microbatches')."
    ]


def test_one_microbatch_says_nothing(init: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    init(microbatches=1)
    fitted("told_of_one", 8)
    assert told(capsys) == []


@pytest.mark.parametrize("method", ["train_on_batch", "test_on_batch", "predict_on_batch"])
def test_a_single_batch_says_so_too(init: Callable[..., None], capsys: pytest.CaptureFixture[str], method: str) -> None:
    init(microbatches=2)
    model, (x, y) = mixing(f"told_in_{method}"), data(8)
    model.compile("sgd", "mse")
    getattr(model, method)(*([x] if method == "predict_on_batch" else [x, y]))
    [text] = told(capsys)
    assert f"layer 'told_in_{method}/centred' (Centred) mixes samples" in text
    assert "here 4 of 8 samples." in text


def test_a_step_of_whole_batches_says_so_and_one_that_is_a_microbatch_does_not(
    init: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without `whole_batch` a step is one microbatch, whatever it computes."""
    init(microbatches=2)
    model, (x, y) = mixing("told_in_steps"), data(8)

    def gradients(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - model(x, training=True)))
        return tape.gradient(loss, model.trainable_variables)

    smp.step(gradients)(tf.constant(x), tf.constant(y))
    assert told(capsys) == []
    smp.step(gradients, whole_batch=True)(tf.constant(x), tf.constant(y))
    [text] = told(capsys)
    assert text.startswith("smp_tf: Step 'gradients': layer 'told_in_steps/centred' (Centred) mixes samples: op ")
    assert "here 4 of 8 samples." in text


def test_a_loss_that_compares_samples_is_none_of_it(
    init: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    init(microbatches=2)
    x, y = data(8)
    model = smp.DistributedModel(lambda: tf_keras.Sequential([layers.Dense(3, input_shape=(6,))]))
    model.compile("sgd", lambda y, p: tf.reduce_mean(tf.nn.softmax(p - tf.reduce_mean(p, 0), axis=0) * y))
    model.fit(x, y, batch_size=8, verbose=0)
    assert told(capsys) == []
