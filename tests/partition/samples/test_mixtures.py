"""What a model computes of several samples is found; what it computes of each is not, however it rearranges them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

from smp_tf.partition.samples.mixtures import Mixtures
from smp_tf.partition.samples.sample_rows import SampleRows
from tests.full_only import params
from tests.partition.traced_step import lowered

#: Samples of the batch, and of a microbatch.
SIZES = (12, 4)
WIDTH = 6


def found(step: Callable[[Any], Any], model: Any, *shape: int, dtype: tf.DType = tf.float32) -> list[tuple[str, ...]]:
    """Where a step mixes samples: the layer, the type of the op, and what it does."""
    specs = [tf.TensorSpec([samples, *shape], dtype) for samples in SIZES]
    whole, part = (lowered(lambda x: step(x), spec, models=[model]).graph for spec in specs)
    mixtures = Mixtures(whole, part, SampleRows(whole, part, SIZES[0])).find()
    return [(mixture.call.class_name, mixture.kind, mixture.words) for mixture in mixtures]


def of_layer(function: Callable[[Any], Any]) -> list[tuple[str, ...]]:
    """Where a model mixes samples that computes something between two layers with weights."""
    model = tf_keras.Sequential([layers.Dense(WIDTH), layers.Lambda(function), layers.Dense(3)])
    return found(lambda x: tf.reduce_mean(tf.square(model(x, training=True))), model, WIDTH)


def minibatch_discrimination(x: Any) -> Any:
    """As Salimans et al. (2016) have it."""
    distances = tf.reduce_sum(tf.abs(x[:, tf.newaxis] - x[tf.newaxis]), -1)
    return tf.concat([x, tf.reduce_sum(tf.exp(-distances), 1, keepdims=True)], 1)


def minibatch_deviation(x: Any) -> Any:
    """As growing GANs have it, in groups of four samples."""
    deviation = tf.math.reduce_std(tf.reshape(x, [4, -1, WIDTH]), 0)
    return tf.concat([x, tf.tile(deviation, [4, 1])], 1)


MIXING: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "less the mean": (lambda x: x - tf.reduce_mean(x, 0), "Mean", "computes one number of several samples"),
    "by the norm": (lambda x: x / tf.norm(x), "Sum", "computes one number of several samples"),
    "own normalisation": (
        lambda x: tf.nn.batch_normalization(x, *tf.nn.moments(x, [0]), None, None, 1e-3),
        *("Mean", "computes one number of several samples"),
    ),
    "in groups": (minibatch_deviation, "Mean", "computes one number of several samples"),
    "chosen by all": (
        lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: -x),
        *("Sum", "computes one number of several samples"),
    ),
    "softmax": (lambda x: tf.nn.softmax(x, axis=0), "Softmax", "normalizes over samples"),
    "attention in the batch": (
        lambda x: tf.nn.softmax(tf.matmul(x, x, transpose_b=True)) @ x,
        *("MatMul", "compares samples with each other"),
    ),
    "covariance": (lambda x: x @ tf.einsum("ij,ik->jk", x, x), "Einsum", "sums over samples"),
    "differences": (minibatch_discrimination, "Sub", "compares samples with each other"),
    "ranks": (
        lambda x: tf.cast(tf.argsort(x, axis=0), x.dtype),
        *("TopKV2", "compares samples with each other"),
    ),
    "in reverse": (lambda x: x + tf.reverse(x, [0]), "ReverseV2", "puts samples in another order"),
    "from the last on": (lambda x: x[::-1] * 2.0, "StridedSlice", "puts samples in another order"),
    "looked up in reverse": (
        lambda x: x + tf.gather(x, tf.range(x.shape[0])[::-1]),
        *("GatherV2", "puts samples in another order"),
    ),
    "shuffled": (lambda x: x + tf.random.shuffle(x), "RandomShuffle", "puts samples in another order"),
    "cumulative": (lambda x: tf.cumsum(x, axis=0), "Cumsum", "adds up one sample after the other"),
    "the first sample": (lambda x: x - x[:1], "Sub", "combines samples with others"),
    "by the size": (lambda x: x / tf.cast(tf.size(x), x.dtype), "RealDiv", "uses the number of samples"),
    "by the samples": (
        lambda x: x / tf.cast(tf.shape(x)[0], x.dtype),
        *("RealDiv", "uses the number of samples"),
    ),
    "as a sequence": (
        lambda x: tf.nn.conv1d(x[tf.newaxis], tf.ones([3, WIDTH, WIDTH]), 1, "SAME")[0],
        *("Conv2D", "goes over samples as over a dimension of each"),
    ),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_samples_is_found(name: str) -> None:
    function, kind, words = MIXING[name]
    assert of_layer(function) == [("Lambda", kind, words)]


class Recommender(tf_keras.Model):
    """As a page on recommenders has it: the contraction is over the samples, too."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.films = layers.Embedding(10, 4), layers.Embedding(10, 4)
        self.bias = layers.Embedding(10, 1)

    def call(self, x: Any) -> Any:
        return tf.sigmoid(tf.tensordot(self.users(x[:, 0]), self.films(x[:, 1]), 2) + self.bias(x[:, 0]))


def test_a_contraction_in_a_models_own_call_is_found() -> None:
    model = Recommender()
    assert found(lambda x: tf.reduce_mean(model(x)), model, 2, dtype=tf.int32) == [
        ("Recommender", "MatMul", "sums over samples")
    ]


def test_what_a_step_mixes_before_its_model_is_found_and_what_it_mixes_afterwards_is_not() -> None:
    model = tf_keras.Sequential([layers.Dense(3)])
    before = found(lambda x: tf.reduce_mean(model(x - tf.reduce_mean(x, 0))), model, WIDTH)
    assert before == [("", "Mean", "computes one number of several samples")]
    assert not found(lambda x: tf.reduce_mean(tf.nn.softmax(model(x), axis=0)), model, WIDTH)


class Pairs(tf_keras.Model):
    """As CLIP: it gives how alike each sample is to every other."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = layers.Dense(4), layers.Dense(4)

    def call(self, x: Any) -> Any:
        return tf.matmul(self.one(x), self.other(x), transpose_b=True)


def test_a_comparison_that_is_a_models_output_is_computed_of_the_whole_batch() -> None:
    model = Pairs()
    assert not found(lambda x: tf.reduce_mean(tf.nn.log_softmax(model(x))), model, WIDTH)


def flat_lookup(x: Any) -> Any:
    """Looks up, in each sample, by places in a tensor of all samples."""
    begins = WIDTH * tf.range(tf.shape(x)[0])[:, tf.newaxis]
    chosen = tf.gather(tf.reshape(x, [-1]), tf.reshape(tf.argsort(x, axis=1) + begins, [-1]))
    return tf.reshape(chosen, [-1, WIDTH])


def experts(x: Any) -> Any:
    """Each sample goes to the expert of its own."""
    chosen, out = tf.argmax(x[:, :3], -1), tf.zeros_like(x)
    for expert in range(3):
        own = tf.where(tf.equal(chosen, expert))
        out = tf.tensor_scatter_nd_update(out, own, tf.gather_nd(x, own) * (expert + 1.0))
    return out


def of_two_views(x: Any) -> Any:
    both = tf.nn.relu(tf.concat([x, -x], 0))
    return both[: tf.shape(x)[0]] * both[tf.shape(x)[0] :]


ORDINARY: dict[str, Callable[[Any], Any]] = {
    "in other shapes": lambda x: tf.reshape(tf.reshape(x, [-1, 3]) @ tf.ones([3, 3]), [-1, WIDTH]),
    "zeros of the samples": lambda x: x + tf.zeros([tf.shape(x)[0], WIDTH]),
    "places of words": lambda x: x + tf.tile(tf.range(float(WIDTH))[tf.newaxis], [tf.shape(x)[0], 1]),
    "mask": lambda x: tf.where(tf.sequence_mask(tf.cast(x[:, 0], tf.int32), WIDTH), x, 0.0),
    "by the width": lambda x: x / tf.cast(tf.shape(x)[1], x.dtype),
    "over time first": lambda x: tf.transpose(tf.cumsum(tf.transpose(x), 0)),
    "sample by sample": lambda x: tf.stack([x[i] - tf.reduce_mean(x[i]) for i in range(x.shape[0])]),
    "mapped": lambda x: tf.map_fn(lambda row: row - tf.reduce_mean(row), x),
    "attention in each": lambda x: tf.einsum("bij,bj->bi", tf.nn.softmax(tf.einsum("bi,bj->bij", x, x)), x),
    "lookup": flat_lookup,
    "in order": lambda x: x + tf.gather(x, tf.range(x.shape[0])),
    "from the last word on": lambda x: x[:, ::-1] * 2.0,
    "experts": experts,
    "two views": of_two_views,
    "heads in the batch": lambda x: tf.concat(tf.split(tf.concat(tf.split(x, 2, -1), 0) * 2.0, 2, 0), -1),
    "repeated": lambda x: tf.reduce_mean(tf.reshape(tf.repeat(x, 3, axis=0), [-1, 3, WIDTH]), 1),
    "norm of each": lambda x: tf.clip_by_norm(x, 1.0, axes=[1]),
    "dropout": lambda x: tf.nn.dropout(x, 0.5, noise_shape=[x.shape[0], 1]),
    "rows per sample": lambda x: tf.math.segment_sum(tf.reshape(x, [-1, 3]), tf.repeat(tf.range(tf.shape(x)[0]), 2)),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_what_is_computed_of_each_sample_is_no_mixture(name: str) -> None:
    assert not of_layer(ORDINARY[name])


def attention() -> Any:
    given = layers.Input((5, WIDTH))
    attended = layers.MultiHeadAttention(2, 4)(given, given, use_causal_mask=True)
    return tf_keras.Model(given, layers.GlobalAveragePooling1D()(layers.LayerNormalization()(attended)))


class AddsSpread(layers.Layer):
    """Adds a loss that compares samples; what it gives does not."""

    def call(self, x: Any) -> Any:
        self.add_loss(tf.reduce_mean(tf.square(x - tf.reduce_mean(x, 0))))
        return x


#: By name: the layers, and the shape of a sample.
MODELS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "recurrent": (lambda: [layers.Masking(), layers.Bidirectional(layers.LSTM(4)), layers.Dense(2)], (5, 3)),
    "unrolled": (lambda: [layers.GRU(4, unroll=True), layers.Dense(2)], (5, 3)),
    "attention": (lambda: [attention(), layers.Dense(2)], (5, WIDTH)),
    "normalised": (
        lambda: [layers.Conv2D(4, 3), layers.GroupNormalization(2), layers.LayerNormalization(), layers.Flatten()],
        (6, 6, 2),
    ),
    "batch normalisation": (lambda: [layers.Conv2D(4, 3), layers.BatchNormalization(), layers.Flatten()], (6, 6, 2)),
    "batch normalisation of features": (lambda: [layers.Dense(4), layers.BatchNormalization()], (WIDTH,)),
    "convolutions": (
        lambda: [layers.Conv2D(4, 3, dilation_rate=2), layers.Conv2DTranspose(3, 3), layers.UpSampling2D()],
        (9, 9, 2),
    ),
    "images": (lambda: [layers.RandomFlip(), layers.RandomContrast(0.1), layers.Resizing(6, 6)], (8, 8, 3)),
    "frames": (lambda: [layers.TimeDistributed(layers.Conv2D(4, 3)), layers.Conv3D(2, 2)], (3, 6, 6, 2)),
    "a loss of several samples": (lambda: [layers.Dense(4), AddsSpread(), layers.Dense(2)], (WIDTH,)),
}


@pytest.mark.parametrize("name", params(list(MODELS), ["recurrent", "unrolled", "images", "frames"]))
def test_layers_of_keras_mix_nothing_but_what_is_known(name: str) -> None:
    make, shape = MODELS[name]
    model = tf_keras.Sequential(make())
    assert not found(lambda x: tf.reduce_mean(tf.square(model(x, training=True))), model, *shape)
