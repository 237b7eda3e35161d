"""What a step's trace is told about the layer calls in a piece of code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import smp_tf as smp
from smp_tf import tf_internals
from smp_tf.keras import layers
from smp_tf.variables.guarded import tracing_step
from smp_tf.variables.model_context import set_step_being_traced


class CallList:
    """Stands for the recorder of a trace: notes (name, class, partition) of each call that is announced."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, int | None]] = []
        self._depth = 0

    @property
    def in_call(self) -> bool:
        """Whether a call is under way."""
        return self._depth > 0

    @contextlib.contextmanager
    def call(self, name: str, class_name: str, stage: int | None = None) -> Iterator[None]:
        """Note a call."""
        self.calls.append((name, class_name, stage))
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


class _AnyModel:
    """Stands for the step that is being traced."""

    @contextlib.contextmanager
    def model_call(self, model: Any) -> Iterator[None]:
        """Make the model's variables without storage."""
        with model._without_storage():
            yield


def calls_of(body: Callable[[], Any]) -> list[tuple[str, str, int | None]]:
    """The layer calls that code announces when it runs inside a step: (name, class, partition), in order."""
    recorder = CallList()
    before = set_step_being_traced(_AnyModel())
    try:
        with (
            tf_internals.scratch_graph("step").as_default(),
            tracing_step(),
            layers.tag_calls(recorder, lambda layer: isinstance(layer, smp.DistributedModel)),
        ):
            body()
    finally:
        set_step_being_traced(before)
    return recorder.calls
