"""Reads what a user's function returns to describe a training: a model, perhaps with example inputs and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from smp_tf.config.values import kind_of
from smp_tf.errors import OfflinePlanError
from smp_tf.keras import adapter
from smp_tf.offline.user_errors import in_a_line, text_of, words_of


@dataclass(frozen=True)
class Example:
    """A training, as a user's function describes it.

    Args:
        model: the model.
        inputs: a batch of one replica that the model is called with: arrays, tensors or `tf.TensorSpec`s. A tuple holds
            several arguments.
        loss: the loss of the model's outputs; None for one in which every output counts.
    """

    model: Any
    inputs: Any
    loss: Callable[[Any], Any] | None = None


def example_of(given: Any) -> Example:
    """Returns the example in a function's result: a model, `(model, inputs)` or `(model, inputs, loss)`.

    Args:
        given: the function's result. A model alone must be one of Keras's functional API, which knows its inputs.

    Raises:
        OfflinePlanError: it is none of these.
    """
    model, *rest = given if isinstance(given, tuple) and given else (given,)
    if not adapter.layers().is_model(model) or len(rest) > 2:
        raise OfflinePlanError(
            f"The function must return a Keras model, or (model, inputs), or (model, inputs, loss). It returned "
            f"{_returned(given)}."
        )
    _require_initialized(model)
    if rest:
        leaves = tf.nest.flatten(rest[0])
        if not leaves:
            raise OfflinePlanError("Example inputs are arrays or tf.TensorSpecs of known rank. The function gave none.")
        for leaf in leaves:
            _require_array(leaf)
        if len(rest) > 1 and rest[1] is not None and not callable(rest[1]):
            raise OfflinePlanError(
                f"The loss must be a function of the model's outputs. The function gave {kind_of(rest[1])}."
            )
        return Example(model, *rest)
    # Of a distributed model around one that knows its inputs, the one inside knows them.
    known: Any = getattr(model, "_smp_keras_model", model)
    if not getattr(known, "inputs", None):
        raise OfflinePlanError(
            f"Model {model.name!r} does not know its inputs before it is called. Let the function return (model, "
            f"inputs), with arrays or tf.TensorSpecs of a batch."
        )
    return Example(model, tf.nest.map_structure(_spec_of_keras, known.input))


def _returned(given: Any) -> str:
    """Returns words for a function's result that is no model."""
    if isinstance(given, tuple):
        return f"a tuple of {len(given)}" + (f", the first of which is {_returned(given[0])}" if given else "")
    if isinstance(given, type):
        return f"the class {given.__name__}"
    if any(kind.__module__.partition(".")[0] == "keras" for kind in type(given).__mro__):
        return f"{kind_of(given)} of Keras 3, and smp_tf takes those of Keras 2 (tf_keras)"
    return kind_of(given)


def _require_initialized(model: Any) -> None:
    try:
        model.name  # noqa: B018
    except Exception as error:
        raise OfflinePlanError(
            f"The model, of type {type(model).__name__}, is not ready for use: {words_of(error)}. Its __init__ begins "
            f"with super().__init__()."
        ) from error


def _require_array(leaf: Any) -> None:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        received = "None" if leaf is None else f"{type(leaf).__name__} {text_of(leaf)[:40]!r}"
    elif not _is_known_to_tensorflow(leaf):
        received = f"{kind_of(leaf)} of {in_a_line(text_of(leaf.dtype))[:40]}, which TensorFlow cannot take"
    elif tf.TensorShape(leaf.shape).rank is None:
        received = f"{kind_of(leaf)} of unknown rank"
    elif tf.TensorShape(leaf.shape).rank == 0:
        raise OfflinePlanError(
            f"Example inputs hold the samples of a batch along their first axis. The function gave a scalar of "
            f"{tf.dtypes.as_dtype(leaf.dtype).name}: let the model make it, or have an element of it for each sample."
        )
    else:
        return
    raise OfflinePlanError(f"Example inputs are arrays or tf.TensorSpecs of known rank. The function gave {received}.")


def _is_known_to_tensorflow(leaf: Any) -> bool:
    try:
        tf.TensorShape(leaf.shape)
        tf.dtypes.as_dtype(leaf.dtype)
        if isinstance(leaf, np.ndarray) and leaf.dtype == object:
            tf.convert_to_tensor(leaf)
    except Exception:
        # It may be anything.
        return False
    return True


def _spec_of_keras(tensor: Any) -> tf.TensorSpec:
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def batch_size_of(example: Example) -> int:
    """Returns the number of samples in the example inputs.

    Args:
        example: the model and its inputs.

    Raises:
        OfflinePlanError: the size of their batch is unknown.
    """
    for leaf in tf.nest.flatten(example.inputs):
        shape = tf.TensorShape(leaf.shape)
        if shape.rank and shape[0] is not None:
            return int(shape[0])
    raise OfflinePlanError("The example inputs have a batch of open size. Say how large it is (--batch-size).")
