"""Knows which states of metrics hold the samples of all replicas, and which those of their own replica alone.

written once per batch of all replicas     equal on all replicas, as in one process
written for each microbatch                added up over the replicas, when a result is wanted
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from smp_tf.errors import StepError
from smp_tf.partition.spread import EVERYWHERE, is_first_at
from smp_tf.sharding import layouts


class ReplicaStates:
    """The states that one of Keras's loops writes.

    Args:
        step: words for the step.
    """

    def __init__(self, step: str) -> None:
        self._step = step
        self._of_each: dict[int, Any] = {}
        #: Whether batches cannot be joined from now on, so that what all hold may become what each holds.
        self.is_apart = False
        #: The identities of the variables that hold the samples of all replicas.
        self.held: set[int] = set()

    def note(self, of_all: Iterable[Any], of_each: Iterable[Any]) -> None:
        """Notes which states a new program of the step writes.

        Args:
            of_all: variables that it writes once for the batches of all replicas.
            of_each: variables that it writes for each microbatch.

        Raises:
            StepError: another program writes one of them in the other way.
        """
        self.held.update(id(variable) for variable in of_all)
        self._of_each.update((id(variable), variable) for variable in of_each)
        for both in [self._of_each[key] for key in self.held & self._of_each.keys()]:
            if not self.is_apart:
                raise StepError(
                    f"{self._step} computes what {both.name!r} holds once for the batches of all replicas, or for each "
                    f"microbatch, but not for one batch in this way and for another in that. Use batches of one size "
                    f"(drop_remainder=True), and one structure."
                )
            self.held.remove(id(both))
            _leave_to_first_replica(both)


def _leave_to_first_replica(variable: Any) -> None:
    """Lets the first replica alone keep what all hold, so that it is the sum over the replicas from now on."""
    if not is_first_at(EVERYWHERE, layouts.here()) and variable.aggregation is tf.VariableAggregation.SUM:
        variable.assign(tf.zeros_like(variable))
