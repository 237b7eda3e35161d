"""What is known of a step's outputs when its program is built, and what a batch makes of it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.batch.output_description import GradientSum, OutputDescription, OutputHolder
from smp_tf.errors import StepError
from smp_tf.partition.trace.lower import OutputSlot
from smp_tf.steps import outputs
from smp_tf.steps.outputs import FlatOutputs


def described(**options: Any) -> dict[str, OutputDescription]:
    """What is known of the results of a step, without their names."""
    model = smp.DistributedModel(tf_keras.Sequential([layers.Dense(1, use_bias=False, name="only")], name="net"))
    metric = tf_keras.metrics.Mean()

    @smp.step(**options)
    def train(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x))
        metric.update_state(loss)
        return {"gradient": tape.gradient(loss, model.trainable_variables)[0], "loss": loss, "mean": metric.result()}

    program, _ = train.find(tf.ones([4, 3]))
    known = program.returned.outputs
    places = [slot.outputs[0] for slot in known.structure.slots]
    by_place = dict(zip(places, known.described, strict=True))
    return {name: by_place[slot.outputs[0]] for name, slot in program.structure.items()}


def test_what_does_not_depend_on_the_batch_is_known_when_the_program_is_built(init: Callable[..., None]) -> None:
    init(microbatches=2)
    found = described()
    here = OutputHolder(0)
    assert found["gradient"] == OutputDescription(found["gradient"].name, here, GradientSum())
    assert found["loss"] == OutputDescription(found["loss"].name, here)
    assert (found["mean"].gradient, found["mean"].follows_state) == (None, True)


def test_so_is_where_gradients_are_averaged_and_what_is_kept_of_them(init: Callable[..., None]) -> None:
    init(microbatches=2, gradient_offload=True)
    found = described(keep_microbatch_gradients=True)
    assert found["gradient"].gradient == GradientSum(device="/CPU:0", has_values=True)


def test_a_ragged_tensor_of_gradients_is_refused_over_replicas(
    init: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    init(microbatches=2)
    ragged = OutputSlot((0, 1), tf.RaggedTensorSpec([None, None], tf.float32))
    outputs._require_averages(ragged, "sum")
    monkeypatch.setattr(outputs.runtime, "current", lambda: SimpleNamespace(topology=SimpleNamespace(replicas=2)))
    outputs._require_averages(OutputSlot((0, 1), tf.IndexedSlicesSpec([None, 3])), "sum")
    with pytest.raises(StepError, match=r"^sum is part of a RaggedTensor made of gradients\. Over replicas"):
        outputs._require_averages(ragged, "sum")


def test_tensors_are_found_by_their_place() -> None:
    one, two, total = tf.constant(1.0), tf.constant(2.0), tf.constant(3.0)
    kept = FlatOutputs([[one, two], None], [None, total], [1, 1], 2)
    again = kept.filled([two, one, total])
    assert again.tensors() == [two, one, total]
    assert again.parts(OutputSlot((0,))) == [two, one]
    assert again.parts(OutputSlot((1,))) is None
    assert again.sum_of(OutputSlot((0,))) is None
    found = again.sum_of(OutputSlot((1,)))
    assert found is not None
    assert (found.value, found.weight) == (total, 2)
