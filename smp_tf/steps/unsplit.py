"""A step that needs no split (one partition, one microbatch, one replica). It runs as in plain Keras.

Inside a `tf.function` the step function is called directly. So the graph holds op for op what it would hold without
smp_tf. If it is called eagerly, it runs as its own `tf.function`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from smp_tf.batch.microbatches import SplitArgument, whole_of
from smp_tf.batch.output import StepOutput
from smp_tf.batch.output_description import OutputDescription
from smp_tf.batch.results import ResultStructure, unpack
from smp_tf.checkpoint import pending
from smp_tf.partition.trace.lower import Lowered, OutputSlot
from smp_tf.partition.trace.trace import Trace
from smp_tf.steps.sequel import Sequel, WithoutTasks
from smp_tf.tf_internals import named
from smp_tf.variables.model_context import set_step_being_traced

#: What is known of an output without a name.
_TENSOR = OutputDescription("tensor")


class _Calls:
    """Stands for the step that is running, so that its models may be called."""

    @contextlib.contextmanager
    def model_call(self, model: Any) -> Iterator[None]:
        """Does nothing: no call needs to be noted."""
        yield


@dataclass(frozen=True, eq=False)
class UnsplitProgram:
    """A step that is ready to run as a whole.

    Args:
        trace: the trace of the step function.
        lowered: what was read off it.
        arguments: the step's tensor arguments.
        call: calls the step function with its real signature, given its tensor arguments.
        then: what comes after the step in the same graph; the program gives what it returns. None: nothing.
    """

    trace: Trace
    lowered: Lowered
    arguments: tuple[SplitArgument, ...]
    call: Callable[[Sequence[Any]], Any]
    then: Sequel | None = None

    def __call__(self, tensors: Sequence[Any]) -> Any:
        """Runs the step.

        Args:
            tensors: tensor arguments of the step. Composite ones are whole.

        Returns:
            The structure that the step returns, with a `StepOutput` in place of every tensor; or what `then` makes of
            it.
        """
        if tf.executing_eagerly() and self.then is not None:
            return self._function(*tensors)
        tensors = [whole_of(a, t) for a, t in zip(self.arguments, tensors, strict=True)]
        if tf.executing_eagerly():
            pending.count_step()
            flat = self.trace.function(*tensors)
            return self._structure.filled([self._output(slot, flat) for slot in self._structure.slots])
        pending.add_check()
        before = set_step_being_traced(_Calls())
        try:
            results = self.call(tensors)
        finally:
            set_step_being_traced(before)
        results = unpack(tf.nest.map_structure(_traced_output, results))
        return results if self.then is None else self.then(results, tensors, WithoutTasks())

    @property
    def key(self) -> object:
        """What tells its trace from all others."""
        return self.trace.key

    @property
    def structure(self) -> Any:
        """What the step function returns, with an `OutputSlot` in place of every tensor."""
        return self.lowered.results

    @functools.cached_property
    def _structure(self) -> ResultStructure:
        return ResultStructure(self.lowered.results)

    @functools.cached_property
    def _function(self) -> Any:
        signature = [argument.spec for argument in self.arguments]
        call = named(lambda *tensors: self(tensors), f"unsplit_{id(self)}")
        return tf.function(call, autograph=False, input_signature=signature)

    def _output(self, slot: OutputSlot, flat: Sequence[tf.Tensor]) -> StepOutput:
        parts = [flat[position] for position in slot.outputs]
        if slot.spec is None:
            return StepOutput(_TENSOR, parts, [1])
        return StepOutput(_TENSOR, [tf.nest.pack_sequence_as(slot.spec, parts, expand_composites=True)], [1])


def _traced_output(value: Any) -> Any:
    if isinstance(value, tf.Variable):
        value = tf.convert_to_tensor(value)
    if isinstance(value, (tf.Tensor, tf.__internal__.CompositeTensor)):
        return StepOutput(OutputDescription(getattr(value, "name", _TENSOR.name)), [value], [1])
    return value
