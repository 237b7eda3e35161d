"""What comes after a step in the same graph: Keras's loops put updates of weights and logs there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class SequelWriter(Protocol):
    """Writes what comes after a step, as the last tasks of the step's list where it has them."""

    def update(self, write: Callable[[], None]) -> None:
        """Writes the update of weights, given what lets the optimizers write theirs."""

    def join(self, write: Callable[[], Any]) -> Any:
        """Writes what brings together the samples of all replicas, and returns it."""

    def log(self, write: Callable[[], Any]) -> Any:
        """Writes the average over the replicas of what is logged, and returns it."""


class Sequel(Protocol):
    """What a step gives in place of its results, made of them in the graph of the step.

    A step that has one updates weights within it. A script's own loop does so after the step.
    """

    def __call__(self, results: Any, tensors: Sequence[Any], last: SequelWriter, /) -> Any:
        """Returns what the step gives.

        Args:
            results: what the step function returns, with a `StepOutput` in place of every tensor.
            tensors: the step's tensor arguments, of the whole batch.
            last: writes updates and logs.
        """


class WithoutTasks:
    """Writes what comes after a step that has no list of tasks."""

    def update(self, write: Callable[[], None]) -> None:
        """Writes the update of weights."""
        write()

    def join(self, write: Callable[[], Any]) -> Any:
        """Writes what is joined, and returns it."""
        return write()

    def log(self, write: Callable[[], Any]) -> Any:
        """Writes what is logged, and returns it."""
        return write()
