"""The signature of a SavedModel: what `tf.saved_model.load(folder).signatures["serving_default"]` takes and gives.

                    by tf_keras alone                      here
type of an input    that of the first layer's arithmetic   what the model was fed
a single output     "output_1", or its layer's name        under this name, and as "output_0"

TensorFlow calls the single output of any other function "output_0". Several outputs have Keras's names only, among
which "output_1" is the first of them.

Private pieces work with tf_keras 2.21. tests/smp_tf/keras/test_serving.py fails when they change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tf_keras.src.saving.legacy import saving_utils
from tf_keras.src.saving.legacy.saved_model import save_impl

from smp_tf.keras.patch import replaced

#: The name of a single output in TensorFlow's own signatures.
ONLY_OUTPUT = "output_0"


@contextlib.contextmanager
def signature_of_fed(model: Any, fed: tuple[tuple[Any, ...], dict[str, Any]] | None) -> Iterator[None]:
    """Makes Keras, within its context, write a signature for a model that takes what the model was fed.

    Args:
        model: the model.
        fed: types of the arguments it was called with, positional ones and those by keyword; None for Keras's own.
    """
    inputs_of, signature_of = saving_utils.model_call_inputs, save_impl.default_save_signature

    def inputs(layer: Any, *args: Any, **kwargs: Any) -> Any:
        positional, named = inputs_of(layer, *args, **kwargs)
        if fed is None or positional is None:
            return positional, named
        return _as_fed(model, positional, named, fed)

    def signature(layer: Any) -> Any:
        if layer is not model:
            return signature_of(layer)
        # Keras writes what layers compute with the types of their arithmetic, which `load_model` looks for.
        with replaced((saving_utils, "model_call_inputs", inputs)):
            return _with_only_output(signature_of(model))

    with replaced((save_impl, "default_save_signature", signature)):
        yield


def _as_fed(
    model: Any, positional: list[Any], named: dict[str, Any], fed: tuple[tuple[Any, ...], dict[str, Any]]
) -> tuple[list[Any], dict[str, Any]]:
    """Returns Keras's types of the arguments of a call, with those that were fed where the two have the same form."""
    first, others, by_keyword = model._call_spec.split_out_first_arg(*fed)
    is_graph = bool(model._is_graph_network)
    # A functional model takes dictionaries for lists of inputs, and the other way round.
    flat = model._flatten_to_reference_inputs(first) if is_graph else tf.nest.flatten(first)
    return (
        [_replaced(positional[0], flat, is_graph), *_replaced(positional[1:], tf.nest.flatten(list(others)))],
        {name: _replaced(specs, tf.nest.flatten(by_keyword.get(name))) for name, specs in named.items()},
    )


def _replaced(specs: Any, fed: list[Any], is_given: bool = False) -> Any:
    flat = tf.nest.flatten(specs)
    if len(flat) != len(fed):
        return specs
    merged = [_merged(spec, other, is_given) for spec, other in zip(flat, fed, strict=True)]
    return tf.nest.pack_sequence_as(specs, merged)


def _merged(spec: Any, fed: Any, is_given: bool) -> Any:
    """Returns the type of an input in the signature.

    Args:
        spec: the type by Keras.
        fed: the type that was fed; None where it was no tensor.
        is_given: whether the script has given the shape with `tf_keras.Input`, so that it counts where it fits.
    """
    if fed is None or spec is None:
        return spec
    if not (isinstance(spec, tf.TensorSpec) and isinstance(fed, tf.TensorSpec)):
        return spec if spec.is_compatible_with(fed) else fed
    if spec.shape.rank is None or fed.shape.rank != spec.shape.rank:
        shape = fed.shape if spec.shape.rank is not None else spec.shape
    elif is_given and spec.shape.is_compatible_with(fed.shape):
        shape = spec.shape
    else:
        shape = spec.shape.most_specific_compatible_shape(fed.shape)
    return tf.TensorSpec(shape, fed.dtype, spec.name)


def _with_only_output(function: Any) -> Any:
    """Returns a function that also gives its output as "output_0", where it has one output."""
    if len(function.structured_outputs) != 1 or ONLY_OUTPUT in function.structured_outputs:
        return function

    def serving(*args: Any, **kwargs: Any) -> dict[str, Any]:
        [(name, output)] = function(*args, **kwargs).items()
        return {name: output, ONLY_OUTPUT: tf.nest.map_structure(tf.identity, output, expand_composites=True)}

    positional, named = function.structured_input_signature
    return tf.function(serving, autograph=False).get_concrete_function(*positional, **named)
