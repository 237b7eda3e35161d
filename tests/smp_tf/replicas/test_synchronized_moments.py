"""Moments over the samples of all replicas, and the methods of layers that they take the place of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from tf_keras import layers

import smp_tf as smp
from smp_tf.errors import StepError
from smp_tf.job import runtime
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.graph.op_kinds import SUM_OVER_REPLICAS
from smp_tf.replicas.synchronized_moments import moments_of

AXES = [0, 1]


def both(x: np.ndarray, y: np.ndarray, masks: Any = (None, None), **options: Any) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """The moments that two replicas get, which take turns: each sum is known once both have given their part."""
    sent: list[list[tf.Tensor]] = [[], []]
    for _ in range(3):
        found = []
        for replica, (own, mask) in enumerate(zip((x, y), masks, strict=True)):
            given: list[tf.Tensor] = []

            def total(vector: tf.Tensor, given: list[tf.Tensor] = given, replica: int = replica) -> tf.Tensor:
                number = len(given)
                given.append(vector)
                other = sent[1 - replica]
                return vector + other[number] if number < len(other) else vector

            found.append(moments_of(tf.constant(own), AXES, total, mask=mask, label="moments of norm", **options))
            sent[replica] = given
    return found


def samples(count: int, shift: float = 0.0) -> np.ndarray:
    return np.random.RandomState(count).randn(count, 3, 2) + shift


@pytest.mark.parametrize("keep_dims", [False, True])
def test_moments_are_those_of_the_union_of_samples(keep_dims: bool) -> None:
    x, y = samples(4), samples(7, 5.0)
    wanted = tf.nn.moments(tf.constant(np.concatenate([x, y])), AXES, keepdims=keep_dims)
    for found in both(x, y, keep_dims=keep_dims):
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-13)


def test_moments_with_a_mask_are_those_of_what_it_leaves() -> None:
    x, y = samples(4), samples(7, 5.0)
    masks = [np.random.RandomState(1).rand(*z.shape[:2]) > 0.5 for z in (x, y)]
    weights = np.concatenate(masks).astype(float)[..., None]
    wanted = tf.nn.weighted_moments(tf.constant(np.concatenate([x, y])), AXES, weights)
    for found in both(x, y, masks, keep_dims=False):
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-13)


def test_a_mask_that_leaves_nothing_anywhere_gives_no_nan() -> None:
    nothing = [np.zeros((4, 3), bool), np.zeros((5, 3), bool)]
    for found in both(samples(4), samples(5), nothing, keep_dims=False):
        assert [list(map(float, moment)) for moment in found] == [[0.0, 0.0], [0.0, 0.0]]


def test_far_from_zero_a_variance_keeps_its_digits() -> None:
    """Mean of squares less square of mean gives 0 here, or 64."""
    x, y = (samples(count, 3e4).astype("float32") for count in (40, 50))
    wanted = np.concatenate([x, y]).astype("float64").var(axis=(0, 1))
    for _, variance in both(x, y, keep_dims=False):
        np.testing.assert_allclose(variance, wanted, rtol=1e-4)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_short_floats_are_added_up_in_float32(dtype: tf.DType) -> None:
    given: list[tf.DType] = []

    def total(vector: tf.Tensor) -> tf.Tensor:
        given.append(vector.dtype)
        return vector

    x = tf.cast(tf.fill([3000, 3, 2], 50.0), dtype)
    mean, variance = moments_of(x, AXES, total, mask=None, keep_dims=False, label="moments")
    assert given == [tf.float32] * 2
    assert (mean.dtype, variance.dtype, float(mean[0]), float(variance[0])) == (dtype, dtype, 50.0, 0.0)


def test_moments_whose_number_depends_on_the_samples_are_refused() -> None:
    def body(x: tf.Tensor) -> Any:
        return moments_of(x, [0], lambda v: v, mask=None, keep_dims=True, label="moments of norm")

    with pytest.raises(StepError, match=r"The moments of norm are .*\(shape \(1, None, 2\)\)\. Leave out virtual_"):
        tf.function(body).get_concrete_function(tf.TensorSpec([4, None, 2]))


class Net(smp.DistributedModel):
    """A normalization between two layers."""

    def __init__(self, norm: Any) -> None:
        super().__init__(name="net")
        self.first, self.norm, self.last = layers.Dense(3), norm, layers.Dense(1)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        return self.last(self.norm(self.first(x), training=training))


def traced(norm: Any, *, training: bool = True) -> OpGraph:
    model = Net(norm)

    @smp.step
    def train(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=training))
        return loss, tape.gradient(loss, model.trainable_variables)

    return train.trace(tf.ones([4, 2])).graph


NORMS = {
    "keras": lambda: layers.BatchNormalization(synchronized=True),
    "older": lambda: layers.experimental.SyncBatchNormalization(),
    "horovod": lambda: hvd.SyncBatchNormalization(),
}


@pytest.mark.parametrize("norm", sorted(NORMS))
def test_in_a_step_a_layer_has_two_sums_over_the_replicas_and_their_gradients(
    init: Callable[..., None], monkeypatch: pytest.MonkeyPatch, norm: str
) -> None:
    """It fails where the methods that are replaced are called in another way."""
    init(microbatches=2)
    assert SUM_OVER_REPLICAS not in {node.op for node in traced(NORMS[norm]()).nodes}, "one replica"
    monkeypatch.setattr(type(runtime.current().topology), "replicas", property(lambda self: 2))
    graph = traced(NORMS[norm]())
    sums = [node for node in graph.nodes if node.op == SUM_OVER_REPLICAS]
    assert [(node.outputs[0].shape, node.backward) for node in sums[:2]] == [((4,), False), ((3,), False)]
    assert sorted((node.outputs[0].shape, node.backward) for node in sums[2:]) == [((3,), True), ((4,), True)]
    assert not any("Horovod" in node.op for node in graph.nodes)
    # An evaluation takes moving averages, and asks for nothing.
    assert SUM_OVER_REPLICAS not in {node.op for node in traced(NORMS[norm](), training=False).nodes}
    plain = traced(layers.BatchNormalization())
    assert SUM_OVER_REPLICAS not in {node.op for node in plain.nodes}


def test_outside_of_steps_layers_are_as_they_were(init: Callable[..., None]) -> None:
    before = [owner.__dict__[name] for owner, name in _methods()]
    init()
    traced(layers.BatchNormalization())
    assert [owner.__dict__[name] for owner, name in _methods()] != before
    norm = layers.BatchNormalization(synchronized=True)
    x = tf.constant(samples(4).astype("float32"))
    np.testing.assert_allclose(
        norm(x, training=True), layers.BatchNormalization(fused=False)(x, training=True), atol=1e-6
    )
    smp.shutdown()
    assert [owner.__dict__[name] for owner, name in _methods()] == before


def _methods() -> list[tuple[Any, str]]:
    from smp_tf.collectives.horovod_layers import methods_of_moments
    from smp_tf.keras import adapter

    return [*adapter.layers().methods_of_synchronized_moments(), *methods_of_moments()]
