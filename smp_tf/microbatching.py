"""Cut the arguments of a step into microbatches.

A batch of n samples becomes m microbatches whose sizes differ by at most one, the larger ones first:

    n = 10, m = 4     samples  0 1 2 | 3 4 5 | 6 7 | 8 9
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from smp_tf.errors import StepError


@dataclass(frozen=True)
class SplitArgument:
    """How one tensor argument is cut.

    Args:
        name: the argument's name in the step function's signature, with its place in a structure.
        axis: the axis that is cut; None for an argument passed whole.
        spec: type of the whole tensor.
    """

    name: str
    axis: int | None
    spec: tf.TensorSpec


def plan_arguments(
    names: Sequence[str],
    roots: Sequence[str],
    tensors: Sequence[tf.Tensor],
    non_split: frozenset[str],
    axes: Mapping[str, int],
) -> tuple[SplitArgument, ...]:
    """Decide for every tensor argument along which axis it is cut.

    Args:
        names: full name of each tensor argument, such as "batch['x']".
        roots: name of the step's parameter each belongs to.
        tensors: the tensors.
        non_split: parameters passed whole.
        axes: the axis of parameters that are not cut along axis 0.

    Returns:
        One entry per tensor.

    Raises:
        StepError: a scalar is to be cut, or the axis does not exist.
    """
    planned = []
    for name, root, tensor in zip(names, roots, tensors, strict=True):
        spec = tf.TensorSpec(tensor.shape, tensor.dtype)
        if root in non_split:
            planned.append(SplitArgument(name, None, spec))
            continue
        axis = axes.get(root, 0)
        rank = tensor.shape.rank
        if rank == 0:
            raise StepError(
                f"Step argument {name!r} is a scalar and cannot be cut into microbatches. Name it in "
                f"@smp.step(non_split_inputs=[{root!r}]) to pass it whole to every microbatch."
            )
        if rank is not None and not -rank <= axis < rank:
            raise StepError(
                f"Step argument {name!r} has {rank} axes, so it cannot be cut along axis {axis}. Change "
                f"input_split_axes={{{root!r}: {axis}}}."
            )
        planned.append(SplitArgument(name, axis % rank if rank is not None else axis, spec))
    return tuple(planned)


def static_batch_size(arguments: Sequence[SplitArgument]) -> int | None:
    """The number of samples in a batch, where every cut argument's shape says so.

    Args:
        arguments: the planned arguments.

    Returns:
        The number; None where it is known only when the step runs. 1 where nothing is cut.

    Raises:
        StepError: the arguments do not have the same number of samples.
    """
    sizes: dict[str, int | None] = {}
    for argument in arguments:
        if argument.axis is not None:
            shape = argument.spec.shape
            sizes[argument.name] = None if shape.rank is None else shape[argument.axis]
    known = {name: size for name, size in sizes.items() if size is not None}
    if len(set(known.values())) > 1:
        listed = ", ".join(f"{name!r} has {size}" for name, size in known.items())
        raise StepError(
            f"All arguments of a step that are cut into microbatches need the same number of samples: {listed}. "
            f"Arguments that are not batches belong in non_split_inputs."
        )
    if len(known) < len(sizes):
        return None
    return next(iter(known.values()), 1)


def sizes_of(batch: int, microbatches: int) -> tuple[int, ...]:
    """Samples in each microbatch.

    Args:
        batch: samples in the batch.
        microbatches: number of microbatches, at most `batch`.

    Returns:
        One size a microbatch, the larger ones first.

    Example:
        >>> sizes_of(10, 4)
        (3, 3, 2, 2)
    """
    quotient, remainder = divmod(batch, microbatches)
    return tuple(quotient + (index < remainder) for index in range(microbatches))


def microbatch_spec(argument: SplitArgument, size: int | None) -> tf.TensorSpec:
    """Type of one microbatch of an argument.

    Args:
        argument: the argument.
        size: samples in every microbatch; None where they differ or are not known.

    Returns:
        The type.
    """
    if argument.axis is None or argument.spec.shape.rank is None:
        return argument.spec
    shape = argument.spec.shape.as_list()
    shape[argument.axis] = size
    return tf.TensorSpec(shape, argument.spec.dtype)


class Slicer:
    """Cuts tensors into microbatches inside a graph; each slice is made once.

    Args:
        arguments: the planned arguments.
        tensors: their tensors.
        microbatches: number of microbatches.
    """

    def __init__(self, arguments: Sequence[SplitArgument], tensors: Sequence[tf.Tensor], microbatches: int) -> None:
        self._arguments = arguments
        self._tensors = list(tensors)
        self._microbatches = microbatches
        self._slices: dict[tuple[int, int], tf.Tensor] = {}
        batch = static_batch_size(arguments)
        if batch is not None:
            sizes: Sequence[Any] = sizes_of(batch, microbatches)
            starts: Sequence[Any] = [sum(sizes[:index]) for index in range(microbatches)]
        else:
            sizes, starts = self._dynamic()
        self.sizes = sizes
        self._starts = starts

    def _dynamic(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        counts = []
        for argument, tensor in zip(self._arguments, self._tensors, strict=True):
            if argument.axis is not None:
                counts.append((argument, tf.shape(tensor, out_type=tf.int64)[argument.axis]))
        first, total = counts[0]
        checks = [
            tf.debugging.assert_equal(
                count,
                total,
                message=f"All arguments of a step that are cut need the same number of samples: {argument.name!r} and "
                f"{first.name!r} differ.",
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

    def __call__(self, argument: int, microbatch: int) -> tf.Tensor:
        """Tensor argument number `argument` of microbatch `microbatch`."""
        key = argument, microbatch
        if key not in self._slices:
            self._slices[key] = self._cut(argument, microbatch)
        return self._slices[key]

    def _cut(self, argument: int, microbatch: int) -> tf.Tensor:
        axis = self._arguments[argument].axis
        tensor = self._tensors[argument]
        if axis is None or self._microbatches == 1:
            return tensor
        start, size = self._starts[microbatch], self.sizes[microbatch]
        part = (slice(None),) * axis + (slice(start, start + size),)
        return tensor[part]
