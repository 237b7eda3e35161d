"""Decides which calls of a step share a program, by types and batch sizes, and says when there are many programs.

batch of 16 ──▶ a program of its own      The first two batch sizes get programs of their own shapes, which is
batch of 12 ──▶ a program of its own      the fastest; a third gets one that takes any size, and so does every
batch of 10 ──▶ ┐                         size after it. A batch of n < M samples runs n microbatches of one
batch of 14 ──▶ ┴ one program for all     sample each, in a program of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from smp_tf.batch.arguments import Arguments
from smp_tf.batch.microbatches import SplitArgument, microbatch_spec
from smp_tf.batch.structure import key_of

#: How many batch sizes get a program of their own shapes, unless the script says otherwise.
OWN_SIZES = 2
#: How many programs for one thing lead to advice, as with tf.function.
_MANY = 5


class NeedsItsSizesError(Exception):
    """A step was traced without the batch size, and another trace shows that it needs the size."""


class Signatures:
    """The signatures that a step was called with so far.

    Args:
        step: name of the step function.
        say: tells the user something once.
        own_sizes: how many batch sizes get a program of their own shapes.
        of_keras: whether it is a step of Keras's loops, which has no options to name.
    """

    def __init__(
        self, step: str, say: Callable[[str], None], own_sizes: int = OWN_SIZES, of_keras: bool = False
    ) -> None:
        self._step = step
        self._of_keras = of_keras
        self._own_sizes = own_sizes
        self._say = say
        self._sizes: dict[Any, list[int]] = {}
        self._structures: dict[Any, list[Mapping[str, Any]]] = {}
        self._shapes: dict[Any, list[Any]] = {}
        self._closed: set[Any] = set()

    def arguments_for_program(
        self, arguments: Arguments, planned: Sequence[SplitArgument], batch: int | None
    ) -> Arguments:
        """Returns the arguments that a new program is made for, when there is none for a call.

        Args:
            arguments: those of the call.
            planned: how they are cut.
            batch: samples in the batch, where its shape says so and they are at least as many as microbatches.

        Returns:
            The same arguments, perhaps without the batch size in their types.
        """
        any_size = tuple(microbatch_spec(argument, None) for argument in planned)
        self._advise(arguments, any_size)
        if batch is None or any_size == arguments.specs:
            return arguments
        sizes = self._sizes.setdefault((key_of(arguments.structure), any_size), [])
        if any_size in self._closed:
            return arguments
        if batch not in sizes:
            sizes.append(batch)
        if len(sizes) <= self._own_sizes:
            return arguments
        if len(sizes) == self._own_sizes + 1 > 1:
            *before, _ = map(str, sizes)
            self._say(
                f"Step {self._step!r} was given batches of {' and '.join(before)} samples, and now one of {batch}. "
                f"Other sizes than the first two share one program that takes any size; what it computes is the same, "
                f"and its shapes are open, which may be slower."
            )
        return dataclasses.replace(arguments, specs=any_size)

    def needs_its_sizes(self, arguments: Arguments, error: Exception) -> None:
        """Notes that a step cannot be traced without the batch size, so that every size gets its own program.

        Args:
            arguments: the arguments of `arguments_for_program` that it could not be traced for.
            error: why it could not.
        """
        self._closed.add(arguments.specs)
        words = " ".join(str(error).split())[:300]
        self._say(
            f"Step {self._step!r} cannot be traced with the batch size left open ({type(error).__name__}: {words}), so "
            f"every size of its batches gets a program of its own. Use tf.shape(x)[0] in place of x.shape[0], or "
            f"batches of one size."
        )

    def _advise(self, arguments: Arguments, any_size: tuple[Any, ...]) -> None:
        """Says which Python values, or which shapes, make program after program."""
        alike = self._structures.setdefault(any_size, [])
        if all(key_of(other) != key_of(arguments.structure) for other in alike):
            alike.append(arguments.structure)
            if len(alike) == _MANY:
                self._say(
                    f"Step {self._step!r} was traced and planned {_MANY} times, since Python values among its "
                    f"arguments change: {_changing(alike)}. Each value is a program of its own. "
                    + (
                        "Batch such values as tensors, one for each sample; then one program takes all."
                        if self._of_keras
                        else "Pass such a value as a tensor, such as tf.constant(0.1), in a parameter named in "
                        "non_split_inputs; then one program takes all."
                    )
                )
        shapes = self._shapes.setdefault(key_of(arguments.structure), [])
        if any_size not in shapes:
            shapes.append(any_size)
            if len(shapes) == _MANY:
                self._say(
                    f"Step {self._step!r} was traced and planned for {_MANY} shapes or types of its tensors, besides "
                    f"the batch size. Each is a program of its own. Pad the tensors to a few shapes"
                    + (
                        "."
                        if self._of_keras
                        else ", or give @smp.step(input_signature=[...]) with None for the dimensions that change."
                    )
                )


def _changing(alike: Sequence[Mapping[str, Any]]) -> str:
    words = []
    for name in alike[0]:
        values = {key_of(structure.get(name)): structure.get(name) for structure in alike}
        if len(values) > 1:
            words.append(f"{name} = {', '.join(repr(value)[:40] for value in values.values())}")
    return "; ".join(words) or "their structure"
