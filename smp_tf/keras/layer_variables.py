"""The variables among a layer's weights, and what stands among them without being one.

layer.weights of StringLookup(output_mode="tf_idf")          every rank
    idf weights, number of documents    variables            stores them: they belong to the script
    handler of the vocabulary           no variable          has the vocabulary that it learned itself

Keras's handlers give tensors (`get_tensors`) and take them (`set_weights`); `num_tensors` says how many.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf
import tf_keras

#: The class of all layers that look up words or numbers in a vocabulary.
Lookup: type[Any] = next(kind for kind in tf_keras.layers.StringLookup.__mro__ if "set_vocabulary" in vars(kind))


def is_variable(weight: Any) -> bool:
    """Returns whether one of a layer's weights is a variable."""
    return isinstance(weight, tf.Variable)


def variables_of(layer: Any) -> list[tf.Variable]:
    """Returns the variables of a layer or model, in Keras's order."""
    return [weight for weight in layer.variables if is_variable(weight)]


def variables_of_script(model: Any) -> Iterator[tf.Variable]:
    """Yields the variables that every rank stores: those of metrics, and those of lookups with a vocabulary."""
    for metric in model.metrics:
        yield from variables_of(metric)
    for layer in model._flatten_layers():
        if isinstance(layer, Lookup):
            yield from variables_of(layer)


def values_in_list(weight: Any) -> int:
    """Returns how many values one of a layer's weights has in the list that Keras's `get_weights` gives."""
    return 1 if is_variable(weight) else int(weight.num_tensors)
