"""What comes after a step in the same graph: Keras's loops put updates of weights and logs there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

#: Writes the tasks of a list that update weights, given what lets the optimizers write their updates.
WriteUpdates = Callable[[Callable[[], None]], None]


class Sequel(Protocol):
    """What a step gives in place of its results, made of them in the graph of the step.

    A step that has one updates weights within it. A script's own loop does so after the step.
    """

    def __call__(self, results: Any, tensors: Sequence[Any], write_updates: WriteUpdates, /) -> Any:
        """Returns what the step gives.

        Args:
            results: what the step function returns, with a `StepOutput` in place of every tensor.
            tensors: the step's tensor arguments, of the whole batch.
            write_updates: calls what lets the optimizers write their updates, where the step's list has it.
        """
