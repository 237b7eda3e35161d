"""Cuts the arguments of a step into microbatches.

A batch of n samples becomes m microbatches whose sizes differ by at most one, the larger ones first:

    n = 10, m = 4     samples  0 1 2 | 3 4 5 | 6 7 | 8 9
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from smp_tf.batch.sliced_objects import ObjectSpec, ObjectTensors, slice_of, slice_spec
from smp_tf.errors import StepError


@dataclass(frozen=True)
class SplitArgument:
    """How one tensor argument is cut.

    Args:
        name: the argument's name in the step function's signature, with its place in a structure.
        axis: the axis that is cut; None for an argument that is passed whole.
        spec: type of the whole tensor. It may be a composite one (ragged, sparse), or an object taken apart.
        piece: type of every microbatch of an object that is cut by its own method; None for anything else.
    """

    name: str
    axis: int | None
    spec: tf.TypeSpec
    piece: ObjectSpec | None = None

    @property
    def is_object(self) -> bool:
        """Returns whether this is an object that is cut by its own method."""
        return self.axis is not None and isinstance(self.spec, ObjectSpec)


def plan_arguments(
    names: Sequence[str],
    roots: Sequence[str],
    specs: Sequence[tf.TypeSpec],
    non_split: frozenset[str],
    axes: Mapping[str, int],
    of_keras: bool = False,
) -> tuple[SplitArgument, ...]:
    """Decides for every tensor argument along which axis it is cut.

    Args:
        names: full name of each tensor argument, such as "batch['x']".
        roots: name of the step's parameter that each belongs to.
        specs: type of each tensor. Composite ones are whole.
        non_split: parameters that are passed whole.
        axes: the axis of parameters that are not cut along axis 0.
        of_keras: whether Keras's loops are given them. Then a message names no option.

    Returns:
        One entry for each tensor.

    Raises:
        StepError: a scalar would be cut, or the axis does not exist.
    """
    planned = []
    for name, root, spec in zip(names, roots, specs, strict=True):
        if root in non_split:
            planned.append(SplitArgument(name, None, spec))
            continue
        axis = axes.get(root, 0)
        if isinstance(spec, ObjectSpec):
            planned.append(SplitArgument(name, axis, spec))
            continue
        if not isinstance(spec, (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)):
            raise StepError(
                f"Step argument {name!r} is of type {spec.value_type.__name__}, which cannot be cut into microbatches. "
                f"Tensors, ragged and sparse tensors can. "
                + ("Give one of these." if of_keras else f"Pass it whole with @smp.step(non_split_inputs=[{root!r}]).")
            )
        rank = spec.shape.rank
        if isinstance(spec, tf.RaggedTensorSpec) and axis != 0:
            raise StepError(
                f"Step argument {name!r} is a ragged tensor, which can only be cut along axis 0. Change "
                f"input_split_axes={{{root!r}: {axis}}}."
            )
        if rank == 0:
            raise StepError(
                f"Step argument {name!r} is a scalar and cannot be cut into microbatches. "
                + (
                    "Batch the data, so that it has one value for each sample, or keep the number in the model."
                    if of_keras
                    else f"Name it in @smp.step(non_split_inputs=[{root!r}]) to pass it whole to every microbatch."
                )
            )
        if rank is not None and not -rank <= axis < rank:
            raise StepError(
                f"Step argument {name!r} has {rank} axes, so it cannot be cut along axis {axis}. Change "
                f"input_split_axes={{{root!r}: {axis}}}."
            )
        planned.append(SplitArgument(name, axis % rank if rank is not None else axis, spec))
    return tuple(planned)


def with_pieces(arguments: Sequence[SplitArgument], microbatches: int) -> tuple[SplitArgument, ...]:
    """Returns the arguments. Those that are cut by their own method get the type of a microbatch.

    Args:
        arguments: the planned arguments.
        microbatches: number of microbatches.
    """
    return tuple(
        dataclasses.replace(a, piece=slice_spec(a.spec, microbatches, a.axis or 0, a.name)) if a.is_object else a
        for a in arguments
    )


def static_batch_size(arguments: Sequence[SplitArgument], of_objects: int = 1, of_keras: bool = False) -> int | None:
    """Returns the number of samples in a batch, where every cut argument's shape says so.

    Args:
        arguments: the planned arguments. Objects with their own method do not say how many samples they have.
        of_objects: the number where only such objects are cut. It is one for each microbatch, so that all weigh alike.
        of_keras: whether Keras's loops are given them. Then a message names no option.

    Returns:
        The number; None where it is known only when the step runs; 1 where nothing is cut.

    Raises:
        StepError: the arguments do not have the same number of samples.
    """
    sizes: dict[str, int | None] = {}
    for argument in arguments:
        if argument.axis is not None and not argument.is_object:
            shape = argument.spec.shape
            sizes[argument.name] = None if shape.rank is None else shape[argument.axis]
    known = {name: size for name, size in sizes.items() if size is not None}
    if len(set(known.values())) > 1:
        listed = ", ".join(f"{name!r} has {size}" for name, size in known.items())
        raise StepError(
            f"All arguments of a step that are cut into microbatches need the same number of samples: {listed}. "
            + (
                "Give inputs, targets and sample weights of as many samples."
                if of_keras
                else "Arguments that are not batches belong in non_split_inputs."
            )
        )
    if len(known) < len(sizes):
        return None
    return next(iter(known.values()), of_objects if any(a.is_object for a in arguments) else 1)


def sizes_of(batch: int, microbatches: int) -> tuple[int, ...]:
    """Returns the samples in each microbatch.

    Args:
        batch: samples in the batch.
        microbatches: number of microbatches, at most `batch`.

    Returns:
        One size for each microbatch, the larger ones first.

    Example:
        >>> sizes_of(10, 4)
        (3, 3, 2, 2)
    """
    quotient, remainder = divmod(batch, microbatches)
    return tuple(quotient + (index < remainder) for index in range(microbatches))


def microbatch_spec(argument: SplitArgument, size: int | None) -> tf.TypeSpec:
    """Returns the type of one microbatch of an argument.

    Args:
        argument: the argument.
        size: samples in every microbatch; None where they differ or are unknown.

    Returns:
        The type.
    """
    spec = argument.spec
    if argument.piece is not None:
        return argument.piece
    if argument.axis is None or argument.is_object or spec.shape.rank is None:
        return spec
    shape = spec.shape.as_list()
    shape[argument.axis] = size
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec(shape, spec.dtype)
    return tf.TensorSpec(shape, spec.dtype)


def whole_of(argument: SplitArgument, value: Any) -> Any:
    """Returns an argument as the only microbatch of its batch."""
    if not argument.is_object:
        return value
    assert argument.axis is not None
    return slice_of(value, 1, 0, argument.axis, argument.name)


class Slicer:
    """Cuts arguments into microbatches inside a graph. Each slice is made once.

    Args:
        arguments: the planned arguments.
        values: tensors of the arguments. Composite ones are whole.
        microbatches: number of microbatches.
    """

    def __init__(self, arguments: Sequence[SplitArgument], values: Sequence[Any], microbatches: int) -> None:
        self._arguments = arguments
        self._values = list(values)
        self._microbatches = microbatches
        self._slices: dict[tuple[int, int], list[tf.Tensor]] = {}
        self._parts: list[tuple[int, int]] = []
        for number, (argument, value) in enumerate(zip(arguments, self._values, strict=True)):
            parts = len(tf.nest.flatten(argument.piece or value, expand_composites=True))
            self._parts += [(number, part) for part in range(parts)]
        batch = static_batch_size(arguments, microbatches)
        if batch is not None:
            sizes: Sequence[Any] = sizes_of(batch, microbatches)
            starts: Sequence[Any] = [sum(sizes[:index]) for index in range(microbatches)]
        else:
            sizes, starts = self._dynamic()
        self.sizes = sizes
        self._starts = starts

    def _dynamic(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        counts = []
        for argument, value in zip(self._arguments, self._values, strict=True):
            if argument.axis is not None and not argument.is_object:
                counts.append((argument, count_samples(value, argument.axis)))
        first, total = counts[0]
        checks = [
            tf.debugging.assert_equal(
                count,
                total,
                # There are no quotes, since TensorFlow would show them with backslashes.
                message=f"All arguments of a step that are cut need the same number of samples: those of "
                f"{argument.name} and {first.name} differ.",
            )
            for argument, count in counts[1:]
        ]
        checks.append(
            tf.debugging.assert_greater_equal(
                total,
                tf.constant(self._microbatches, tf.int64),
                message=f"A batch has fewer samples than the {self._microbatches} microbatches it is cut into. Where "
                f"the batch size is not known when the step is traced, every batch needs at least that many.",
            )
        )
        with tf.control_dependencies([check for check in checks if check is not None]):
            total = tf.identity(total)
        quotient, remainder = total // self._microbatches, total % self._microbatches
        sizes, starts = [], []
        for index in range(self._microbatches):
            sizes.append(quotient + tf.cast(index < remainder, tf.int64))
            starts.append(index * quotient + tf.minimum(tf.constant(index, tf.int64), remainder))
        return sizes, starts

    def __call__(self, tensor: int, microbatch: int) -> tf.Tensor:
        """Returns tensor number `tensor` of microbatch `microbatch`. Parts of composite arguments count one by one."""
        argument, part = self._parts[tensor]
        key = argument, microbatch
        if key not in self._slices:
            if self._all_at_once(argument):
                parts = tf.split(self._values[argument], list(self.sizes), axis=self._arguments[argument].axis)
                self._slices.update({(argument, number): [value] for number, value in enumerate(parts)})
            else:
                self._slices[key] = tf.nest.flatten(self._cut(argument, microbatch), expand_composites=True)
        return self._slices[key][part]

    def _all_at_once(self, argument: int) -> bool:
        """Returns whether one op cuts an argument into all its microbatches."""
        static = self._microbatches > 1 and all(isinstance(size, int) for size in self.sizes)
        return static and self._arguments[argument].axis is not None and isinstance(self._values[argument], tf.Tensor)

    def _cut(self, argument: int, microbatch: int) -> Any:
        axis = self._arguments[argument].axis
        value = self._values[argument]
        if self._arguments[argument].is_object:
            assert axis is not None
            return self._cut_object(argument, microbatch, axis)
        if axis is None or self._microbatches == 1:
            return value
        start, size = self._starts[microbatch], self.sizes[microbatch]
        return cut_out(value, axis, start, size)

    def _cut_object(self, argument: int, microbatch: int, axis: int) -> ObjectTensors:
        planned = self._arguments[argument]
        found = slice_of(self._values[argument], self._microbatches, microbatch, axis, planned.name)
        if planned.piece is None or planned.piece.common(found._type_spec) is None:
            raise StepError(
                f"smp_slice of step argument {planned.name!r} gave {found.template!r} for microbatch {microbatch}, and "
                f"something else when the step was traced. It must give the same structure every time."
            )
        return found


def cut_out(value: Any, axis: int, start: Any, size: Any) -> Any:
    """Returns some consecutive samples of a tensor, ragged tensor or sparse tensor.

    Args:
        value: the tensor.
        axis: the axis along which its samples lie.
        start: number of the first sample, an int or an int64 scalar.
        size: number of samples, an int or an int64 scalar.
    """
    if isinstance(value, tf.SparseTensor):
        first = [0] * value.shape.rank
        shape: list[Any] = tf.unstack(value.dense_shape, num=value.shape.rank)
        first[axis], shape[axis] = start, size
        return tf.sparse.slice(value, first, shape)
    return value[(slice(None),) * axis + (slice(start, start + size),)]


def count_samples(value: Any, axis: int) -> tf.Tensor:
    """Returns the number of samples of a tensor, ragged tensor or sparse tensor, an int64 scalar."""
    if isinstance(value, tf.RaggedTensor):
        return tf.cast(value.nrows(), tf.int64)
    if isinstance(value, tf.SparseTensor):
        return value.dense_shape[axis]
    return tf.shape(value, out_type=tf.int64)[axis]
