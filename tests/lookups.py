"""Models that begin with a lookup, and places in which its vocabulary may be set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp

WORDS = np.array([["a"], ["b"], ["c"], ["a b"], ["b c"], ["a c d"], ["d d"], ["a"]])
NUMBERS = np.arange(3, 11)[:, None]
#: Of a fixed size, so that a vocabulary may come after the model.
FIXED = {"max_tokens": 8, "pad_to_max_tokens": True}
KINDS: dict[str, tuple[Callable[[], Any], np.ndarray]] = {
    "string": (lambda: layers.StringLookup(output_mode="multi_hot", **FIXED), WORDS),
    "integer": (lambda: layers.IntegerLookup(output_mode="one_hot", **FIXED), NUMBERS),
    "text": (lambda: layers.TextVectorization(output_mode="count", **FIXED), WORDS),
    "tf-idf": (lambda: layers.TextVectorization(output_mode="tf_idf", **FIXED), WORDS),
}
#: Where the vocabulary is learned; "set": where the script gives it.
PLACES = ("before", "builder", "after", "set")
VARIANTS = tuple(f"{kind} {place}" for kind in KINDS for place in PLACES)


def learn(lookup: Any, kind: str, place: str) -> None:
    """Give a lookup its vocabulary."""
    if place != "set":
        lookup.adapt(KINDS[kind][1])
    elif kind == "tf-idf":
        lookup.set_vocabulary(["a", "b"], idf_weights=[0.2, 0.3])
    else:
        lookup.set_vocabulary([4, 7] if kind == "integer" else ["a", "b"])


def trained(variant: str, wrap: Callable[[Callable[[], Any]], Any]) -> tuple[Any, Any, list[Any]]:
    """A model of a lookup and two layers after three batches.

    Args:
        variant: what is looked up, and where the vocabulary is set.
        wrap: makes the model of its builder.

    Returns:
        The model, what it predicts, and its weights.
    """
    kind, place = variant.split(" ")
    make, x = KINDS[kind]
    lookup = make()

    def build() -> tf_keras.Model:
        if place in ("builder", "set"):
            learn(lookup, kind, place)
        inputs = tf_keras.Input((1,), dtype=tf.int64 if kind == "integer" else tf.string)
        hidden = layers.Dense(3, "tanh", kernel_initializer="ones")(lookup(inputs))
        return tf_keras.Model(inputs, layers.Dense(2, kernel_initializer="ones")(hidden))

    if place == "before":
        learn(lookup, kind, place)
    model = wrap(build)
    if place == "after":
        learn(lookup, kind, place)
    model.compile(tf_keras.optimizers.SGD(0.1), "mse")
    model.fit(x, np.cos(np.arange(16.0)).reshape(8, 2), batch_size=4, epochs=2, shuffle=False, verbose=0)
    return model, model.predict(x, batch_size=4, verbose=0), list(model.get_weights())


def check(variant: str, folder: Path) -> None:
    """Hold a distributed model, and what is saved of it, against plain Keras."""
    _, wanted, weights = trained(variant, lambda build: build())
    model, found, shards = trained(variant, smp.DistributedModel)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert len(shards) == len(weights)
    for ours, theirs in zip(shards, weights, strict=True):
        assert ours.shape == theirs.shape
        same = ours.tolist() == theirs.tolist() if ours.dtype == object else np.allclose(ours, theirs, atol=1e-6)
        assert same, f"{ours} for {theirs}"
    model.set_weights(shards)
    model.set_weights(model.get_weights())
    for path in (folder / f"{variant}.keras", folder / variant):
        model.save_model(path)
        if smp.rank() == 0:
            loaded = tf_keras.models.load_model(path)
            np.testing.assert_allclose(loaded.predict(KINDS[variant.split(" ")[0]][1], verbose=0), wanted, atol=1e-6)
