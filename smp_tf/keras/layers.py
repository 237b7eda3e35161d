"""Layers and models of tf_keras: their variables, and their calls.

A layer's weights may include objects that are no variables:

layer.weights of StringLookup(output_mode="tf_idf")          every rank
    idf weights, number of documents    variables            stores them: they belong to the script
    handler of the vocabulary           no variable          has the vocabulary that it learned itself

Keras's handlers return tensors (`get_tensors`) and take them (`set_weights`). `num_tensors` says how many.

Private pieces work with tf_keras 2.21. tests/smp_tf/keras/test_layers.py fails when they change.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
import tf_keras
from tf_keras.src import backend
from tf_keras.src.engine import base_layer_utils

from smp_tf.keras import placed_layers
from smp_tf.keras.protocols import Place
from smp_tf.partition.trace.trace import Recorder

#: The class of all layers that look up words or numbers in a vocabulary.
_Lookup: type[Any] = next(kind for kind in tf_keras.layers.StringLookup.__mro__ if "set_vocabulary" in vars(kind))
#: The class of all layers that normalize by moments of their batch.
_Normalization: type[Any] = next(
    kind for kind in tf_keras.layers.BatchNormalization.__mro__ if "_sync_calculate_mean_and_var" in vars(kind)
)


def is_model(value: Any) -> bool:
    """Returns whether something is a model."""
    return isinstance(value, tf_keras.Model)


def is_metric(value: Any) -> bool:
    """Returns whether something is a metric."""
    return isinstance(value, tf_keras.metrics.Metric)


def is_symbolic(tensor: Any) -> bool:
    """Returns whether a tensor stands for the input or output of a layer, and has no value."""
    return bool(tf_keras.backend.is_keras_tensor(tensor))


def floatx() -> str:
    """Returns the name of the type that numbers have by default."""
    name: str = tf_keras.backend.floatx()
    return name


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
        if isinstance(layer, _Lookup):
            yield from variables_of(layer)


def values_in_list(weight: Any) -> int:
    """Returns how many values one of a layer's weights has in the list that Keras's `get_weights` gives."""
    return 1 if is_variable(weight) else int(weight.num_tensors)


def layer_in_call() -> str | None:
    """Returns the name of the layer or model that is being called in this thread; None where none is.

    Where one calls another, it is the inner one.
    """
    context = base_layer_utils.call_context()
    return str(context.layer.name) if context.in_call else None


@contextlib.contextmanager
def tag_calls(
    recorder: Recorder,
    is_distributed: Callable[[Any], bool],
    around: Callable[[Any], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    note: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] | None = None,
) -> Iterator[None]:
    """Announces to the recorder, within its context, the call of every layer that a distributed model calls.

    Args:
        recorder: the recorder to announce calls to.
        is_distributed: returns whether a layer is a distributed model. Calls outside any such model are not announced.
        around: takes a layer that is called outside any such model, and returns the context to call it in. The context
            may announce the call of the model that the layer is part of.
        note: takes each layer that is called so, with the arguments of the call.
    """
    original = tf_keras.layers.Layer.__call__

    @functools.wraps(original)
    def tagged(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if not (recorder.in_call or is_distributed(layer)):
            with around(layer):
                return tagged(layer, *args, **kwargs) if recorder.in_call else original(layer, *args, **kwargs)
        stage = placed_layers.stage_of(layer)
        with recorder.call(layer.name, type(layer).__name__, stage):
            if note is not None:
                note(layer, args, kwargs)
            return original(layer, *args, **kwargs)

    tf_keras.layers.Layer.__call__ = tagged
    try:
        yield
    finally:
        tf_keras.layers.Layer.__call__ = original


def seed_initializers(generator: random.Random) -> None:
    """Lets Keras draw the seeds of initializers in this thread from a generator."""
    backend._SEED_GENERATOR.generator = generator


def constructors() -> list[Place]:
    """Returns the methods that construct every layer."""
    return [(tf_keras.layers.Layer, "__init__")]


def makers_of_read_variables() -> list[Place]:
    """Returns methods that make variables which belong to the script, or which they read at once."""
    return [
        (tf_keras.metrics.Metric, "add_weight"),
        (tf_keras.layers.Normalization, "build"),
        (_Lookup, "__init__"),
    ]


def adapting_methods() -> list[Place]:
    """Returns methods by which layers adapt to data, with functions of their own over their variables."""
    return [(tf_keras.layers.experimental.preprocessing.PreprocessingLayer, "adapt")]


def methods_of_synchronized_moments() -> list[Place]:
    """Returns the methods by which layers take mean and variance of what all processes have."""
    return [(_Normalization, "_sync_calculate_mean_and_var")]


def readers_of_values() -> tuple[list[Place], list[Place]]:
    """Returns the functions that give the value of a variable, and those that give values of several.

    Every module that has imported them has them. Scripts, and Keras itself, call them through these modules.
    """
    named = [module for name, module in list(sys.modules.items()) if name.startswith("tf_keras.")]
    modules = [module for module in named if getattr(module, "batch_get_value", None) is backend.batch_get_value]
    return [(module, "get_value") for module in modules], [(module, "batch_get_value") for module in modules]
