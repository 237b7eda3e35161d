"""What steps call a distributed model with, by which the signature of its SavedModel is written.

A signature has one type for each input:

    first step        float64 [4, 10]     counts
    another length    float64 [4, 12]     leaves that dimension open: float64 [None, None]
    another type      float32 [4, 10]     does not count

The number of samples is open.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

#: Types of the arguments of a call: positional ones, and those by keyword. None stands for what is no tensor.
Types = tuple[tuple[Any, ...], dict[str, Any]]


class FedTypes:
    """Remembers with which types a model was called."""

    def __init__(self) -> None:
        self._known: Types | None = None

    @property
    def known(self) -> Types | None:
        """Returns the types of the model's calls in steps so far; None where no step has called it."""
        return self._known

    def note(self, types: Types) -> None:
        """Notes the types of one more call. A call that is too different from the first one changes nothing.

        Args:
            types: of its arguments.
        """
        if self._known is None:
            self._known = types
            return
        try:
            tf.nest.assert_same_structure(self._known, types)
        except (TypeError, ValueError):
            return
        pairs = list(zip(tf.nest.flatten(self._known), tf.nest.flatten(types), strict=True))
        common = [_common(known, other) for known, other in pairs]
        if all((known is None) == (found is None) for (known, _), found in zip(pairs, common, strict=True)):
            self._known = tf.nest.pack_sequence_as(self._known, common)


def _common(known: tf.TypeSpec | None, other: tf.TypeSpec | None) -> tf.TypeSpec | None:
    """Returns the narrowest type that holds the values of both; None where there is none."""
    if known is None or other is None:
        return None
    return known.most_specific_common_supertype([other])


def types_of(args: tuple[Any, ...], kwargs: dict[str, Any], axis_of: Callable[[Any], int | None]) -> Types:
    """Returns the types of the arguments of a call, for any number of samples.

    Args:
        args: the positional arguments.
        kwargs: the arguments by keyword.
        axis_of: takes a tensor and returns the axis along which the step cuts it, where it is an argument of the step.
    """
    types: Types = tf.nest.map_structure(lambda value: _type_of(value, axis_of), (args, dict(kwargs)))
    return types


def _type_of(value: Any, axis_of: Callable[[Any], int | None]) -> tf.TypeSpec | None:
    if not tf.is_tensor(value) or isinstance(value, tf.Variable):
        return None
    spec = tf.type_spec_from_value(value)
    shape = getattr(spec, "shape", None)
    if not shape or not isinstance(spec, (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)):
        return spec
    # As in Keras, the first axis holds samples where nothing else is known.
    opened = {0, axis_of(value) or 0}
    return with_shape(spec, [None if axis in opened else size for axis, size in enumerate(shape.as_list())])


def with_shape(spec: tf.TypeSpec, shape: Any) -> tf.TypeSpec:
    """Returns the type of tensors of another shape.

    Args:
        spec: type of dense, ragged or sparse tensors.
        shape: their shape.
    """
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec(shape, spec.dtype)
    return tf.TensorSpec(shape, spec.dtype, spec.name)
