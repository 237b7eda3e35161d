"""Keras writes the signature of a SavedModel for the types that it is told, and a single output also as "output_0"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers
from tf_keras.src.saving.legacy import saving_utils
from tf_keras.src.saving.legacy.saved_model import save_impl

from smp_tf.keras import archives, serving

pytestmark = pytest.mark.usefixtures("keras_defaults")


def model_of(length: int | None, outputs: int = 1) -> Any:
    inputs = layers.Input((length, 3), name="x")
    return tf_keras.Model(inputs, [layers.Dense(1, name=f"head{number}")(inputs) for number in range(outputs)])


@pytest.mark.parametrize(
    ("length", "fed", "wanted"),
    [
        (5, [None, 5, 3], [None, 5, 3]),
        (None, [None, 5, 3], [None, None, 3]),
        (5, [None, 5, 3, 1], [None, 5, 3, 1]),
    ],
    ids=["the same", "one of many lengths", "one more axis, which Keras drops"],
)
def test_the_signature_takes_the_type_that_was_fed_and_the_shape_of_the_input_where_it_fits(
    length: int | None, fed: list[int | None], wanted: list[int | None]
) -> None:
    model = model_of(length)
    with serving.signature_of_fed(model, ((tf.TensorSpec(fed, tf.float64),), {})):
        signature = save_impl.default_save_signature(model)
    assert [(t.shape.as_list(), t.dtype) for t in signature.inputs if t.dtype != tf.resource] == [(wanted, tf.float64)]
    assert sorted(signature.structured_outputs) == ["head0", "output_0"]


@pytest.mark.parametrize("fed", [None, (([tf.TensorSpec([None, 3], tf.int64)] * 2,), {}), ((None,), {})])
def test_where_nothing_of_the_kind_was_fed_it_takes_what_keras_says(fed: Any) -> None:
    model = model_of(5, outputs=2)
    with serving.signature_of_fed(model, fed):
        signature = save_impl.default_save_signature(model)
    assert [t.dtype for t in signature.inputs if t.dtype != tf.resource] == [tf.float32]
    assert sorted(signature.structured_outputs) == ["head0", "head1"]


def test_other_models_and_later_files_are_as_keras_writes_them(tmp_path: Path) -> None:
    model, other = model_of(5), model_of(5)
    before = (saving_utils.model_call_inputs, save_impl.default_save_signature)
    with serving.signature_of_fed(model, ((tf.TensorSpec([None, 5, 3], tf.float64),), {})):
        assert sorted(save_impl.default_save_signature(other).structured_outputs) == ["head0"]
    assert (saving_utils.model_call_inputs, save_impl.default_save_signature) == before


def test_a_file_has_the_signature(tmp_path: Path) -> None:
    model = model_of(5)
    archives.write_model(model, str(tmp_path / "saved"), "tf", ((tf.TensorSpec([None, 5, 3], tf.int64),), {}))
    loaded = tf.saved_model.load(tmp_path / "saved")
    batch = tf.ones([2, 5, 3], tf.int64)
    found = loaded.signatures["serving_default"](batch)
    assert found["output_0"].numpy() == pytest.approx(tf.nest.flatten(model(batch))[0].numpy())
