"""Models whose tensors are large enough for TensorFlow's allocator to be compared with the forecast.

The benchmark of memory measures them, too.
"""

from __future__ import annotations

import functools
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras import layers

from tests.distributed.memory_families import FAMILIES
from tests.distributed.models import (
    Batch,
    Block,
    ZooModel,
    classification,
)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@functools.cache
def _example(name: str) -> dict[str, Any]:
    """What a script among the examples defines."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def _images(side: int, samples: int) -> Any:
    def batch(step: int) -> Batch:
        random = np.random.RandomState(step)
        images = random.standard_normal((samples, side, side, 3)).astype("float32")
        return images, random.randint(0, 5, samples).astype(np.int32)

    return batch


def _tokens(length: int, vocabulary: int, samples: int) -> Any:
    def batch(step: int) -> Batch:
        text = np.random.RandomState(step).randint(0, vocabulary, (samples, length + 1)).astype(np.int32)
        return text[:, :-1], text[:, 1:]

    return batch


def _vectors(width: int, samples: int) -> Any:
    def batch(step: int) -> Batch:
        random = np.random.RandomState(step)
        vectors = random.standard_normal((samples, width)).astype("float32")
        return vectors, random.randint(0, 5, samples).astype(np.int32)

    return batch


def _sequences(length: int, width: int, samples: int) -> Any:
    def batch(step: int) -> Batch:
        random = np.random.RandomState(step)
        rows = random.standard_normal((samples, length, width)).astype("float32")
        return rows, random.randint(0, 5, samples).astype(np.int32)

    return batch


def gpt(base: type) -> tf_keras.Model:
    """A language model whose output layer is its token embedding."""

    class GPT(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.tokens = layers.Embedding(4000, 256)
            self.positions = layers.Embedding(128, 256)
            self.blocks = [Block(256, 8) for _ in range(4)]
            self.norm = layers.LayerNormalization()

        def call(self, tokens: tf.Tensor, training: bool = False) -> tf.Tensor:
            x = self.tokens(tokens) + self.positions(tf.range(tf.shape(tokens)[1]))
            for block in self.blocks:
                x = block(x)
            return tf.matmul(self.norm(x), self.tokens.embeddings, transpose_b=True)

    return GPT()


def conv(base: type) -> tf_keras.Model:
    """Convolutions, normalised, over larger images than elsewhere in the zoo."""
    model = tf_keras.Sequential([layers.Input((64, 64, 3))])
    for width in (32, 64, 128, 256):
        model.add(layers.Conv2D(width, 3, padding="same", use_bias=False))
        model.add(layers.BatchNormalization())
        model.add(layers.ReLU())
        model.add(layers.MaxPool2D())
    model.add(layers.GlobalAveragePooling2D())
    model.add(layers.Dense(5))
    return model


def mlp(base: type) -> tf_keras.Model:
    """Dense layers, most of whose memory is weights."""
    return tf_keras.Sequential(
        [layers.Input((1024,))] + [layers.Dense(1024, activation="tanh") for _ in range(6)] + [layers.Dense(5)]
    )


def deep(base: type) -> tf_keras.Model:
    """Many dense layers: what an optimizer makes of all their weights at once would be most of what comes and goes."""
    return tf_keras.Sequential(
        [layers.Input((512,))] + [layers.Dense(512, activation="tanh") for _ in range(24)] + [layers.Dense(5)]
    )


def lstm(base: type) -> tf_keras.Model:
    """Recurrent layers, whose loops keep something of each step for their gradients."""
    model = tf_keras.Sequential([layers.Input((16, 256))])
    for _ in range(3):
        model.add(layers.LSTM(512, return_sequences=True))
    model.add(layers.LSTM(512))
    model.add(layers.Dense(5))
    return model


def resnet50(base: type) -> tf_keras.Model:
    """ResNet50 as Keras ships it."""
    return tf_keras.applications.ResNet50(weights=None, input_shape=(96, 96, 3), classes=5, classifier_activation=None)


def digits(base: type) -> tf_keras.Model:
    """The convolutional network of the first example."""
    model: tf_keras.Model = _example("digits")["Net"]()
    return model


def _digits(step: int) -> Batch:
    images, _, labels, _ = _example("digits")["digits"]()
    return np.resize(images, (4096, *images.shape[1:])), np.resize(labels, 4096)


def language_model(base: type) -> tf_keras.Model:
    """The language model of the second example, as large as there."""
    model: tf_keras.Model = _example("language_model")["GPT"](100, 64, 96, 4, 4)
    return model


def _momentum() -> Any:
    return tf_keras.optimizers.SGD(1e-3, momentum=0.9)


def _adam() -> Any:
    return tf_keras.optimizers.Adam(1e-4)


def _entry(name: str, build: Any, batch: Any, **rest: Any) -> ZooModel:
    return ZooModel(name, build, batch, **{"loss": classification, "optimizer": _adam, "floatx": "float32", **rest})


MODELS: dict[str, ZooModel] = {
    entry.name: entry
    for entry in (
        _entry("gpt", gpt, _tokens(128, 4000, 16), form="subclass"),
        _entry("conv", conv, _images(64, 128)),
        _entry("mlp", mlp, _vectors(1024, 256), optimizer=_momentum),
        _entry("deep", deep, _vectors(512, 512)),
        _entry("lstm", lstm, _sequences(16, 256, 512)),
        _entry("resnet50", resnet50, _images(96, 16)),
        # For the benchmark: of their weights none is counted, and of the rest what is there with such large batches.
        _entry("digits", digits, _digits, form="subclass"),
        _entry("language_model", language_model, _tokens(64, 100, 256), form="subclass"),
    )
} | FAMILIES
