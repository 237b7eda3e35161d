"""Records `apply_gradients` inside a `train_step`, which is traced for one microbatch, and runs it once per batch.

traced for one microbatch                       in the graph of the whole batch

gradients = tape.gradient(loss, weights)        pipeline: gradients of all microbatches, added up
optimizer.apply_gradients(...)   ─ recorded ─▶  optimizer.apply_gradients(average gradients)
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from smp_tf.errors import StepError


@dataclass(frozen=True)
class RecordedApply:
    """One call of `apply_gradients` while a microbatch was traced.

    Args:
        optimizer: the optimizer.
        variables: the variables that it was to change, in order.
        gradients: gradients of these for the microbatch; None where there is none.
        apply: takes pairs of gradients and variables, and calls the same method with the same further arguments.
        position: number of operations in the graph at that time.
    """

    optimizer: Any
    variables: tuple[Any, ...]
    gradients: tuple[Any, ...]
    apply: Callable[[Sequence[tuple[Any, Any]]], Any]
    position: int

    def without_gradients(self) -> RecordedApply:
        """Returns the call without the microbatch's gradients, which hold its graph."""
        return replace(self, gradients=())


class _Recording(threading.local):
    current: ApplyRecorder | None = None


_recording = _Recording()


def recorder() -> ApplyRecorder | None:
    """Returns the recorder for calls of `apply_gradients` in this thread; None where they are to be run."""
    return _recording.current


class ApplyRecorder:
    """Notes the calls of `apply_gradients` of one microbatch.

    Args:
        step: name of the step, for messages.
    """

    def __init__(self, step: str) -> None:
        self._step = step
        self._graph: Any = None
        self.applies: list[RecordedApply] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Keeps optimizers from applying anything within its context, which is in the graph of the microbatch."""
        self._graph = tf.compat.v1.get_default_graph()
        before, _recording.current = _recording.current, self
        try:
            yield
        finally:
            _recording.current = before
        self._check_what_follows()

    def record(
        self, optimizer: Any, pairs: Sequence[tuple[Any, Any]], apply: Callable[[Sequence[tuple[Any, Any]]], Any]
    ) -> tf.Operation:
        """Notes that gradients are to be applied.

        Args:
            optimizer: the optimizer.
            pairs: gradients and variables.
            apply: takes such pairs, and does what was called.

        Returns:
            An operation that does nothing.

        Raises:
            StepError: the call is in a branch or loop, so that only the running step decides about it.
        """
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise StepError(
                f"{self._step} applies gradients inside a tf.cond, a loop or a function of its own. Gradients are "
                f"applied once per batch, after all microbatches, so whether that happens cannot be decided in one of "
                f"them. Call apply_gradients outside it; to leave a step out, apply gradients multiplied by zero, or "
                f"write a loop of your own over @smp.step."
            )
        gradients, variables = zip(*pairs, strict=True) if pairs else ((), ())
        self.applies.append(RecordedApply(optimizer, variables, gradients, apply, len(self._graph.get_operations())))
        return tf.no_op()

    def _check_what_follows(self) -> None:
        """Raises an error where something was computed from a variable after gradients were to be applied to it."""
        if not self.applies:
            return
        inside = {internal.name: external for external, internal in self._graph.captures}
        operations = self._graph.get_operations()
        for apply in self.applies:
            changed = {id(variable.handle): variable for variable in apply.variables}
            for operation in operations[apply.position :]:
                for tensor in operation.inputs:
                    variable = changed.get(id(inside.get(tensor.name)))
                    if variable is not None:
                        raise StepError(
                            f"{self._step} reads {variable.name!r} (op {operation.name!r}) after it has applied "
                            f"gradients to it with {type(apply.optimizer).__name__}. Gradients are applied once per "
                            f"batch, after all microbatches, so what comes later in the same step would see the old "
                            f"value. Compute everything before the first apply; or, where the second phase needs the "
                            f"new weights (two phases of a GAN), write two functions with @smp.step, one a phase, and "
                            f"call one after the other in a loop of your own."
                        )
