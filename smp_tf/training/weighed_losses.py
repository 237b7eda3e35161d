"""What microbatches take gradients of, where their own losses do not average to that of the batch.

See `whole_batch/loss_coefficients.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from smp_tf.training.loss_denominators import Denominators
from smp_tf.whole_batch.loss_coefficients import CallCoefficients, LossCoefficients


class WeighedError(Exception):
    """A step has a loss that its microbatches do not average to that of the batch, and for which there is a way.

    Args:
        coefficients: what the samples count, for batches of the structure that the step was traced for.
    """

    def __init__(self, coefficients: LossCoefficients) -> None:
        super().__init__()
        self.coefficients = coefficients


def replaced_losses(
    calls: Sequence[CallCoefficients], coefficients: Sequence[tf.Tensor], denominators: Denominators
) -> dict[int, Callable[[], list[tuple[str, Any]]]]:
    """Returns what calls take gradients of in a microbatch, in place of its loss.

    Args:
        calls: the calls.
        coefficients: what the samples of the microbatch count, in the order of the calls and of their tensors.
        denominators: what knows how many samples the whole batch has.

    Returns:
        By number of a call, what writes down names of tensors, and what each counts.
    """
    given = iter(coefficients)
    of_call = [[next(given) for place in range(len(c.tensors)) if place not in c.constants] for c in calls]

    def parts_of(call: CallCoefficients, rows: Sequence[tf.Tensor]) -> list[tuple[str, Any]]:
        left = iter(rows)
        found: list[tuple[str, Any]] = []
        for place, name in enumerate(call.tensors):
            if place in call.constants:
                found.append((name, tf.constant(call.constants[place])))
            else:
                value = next(left)
                # Averages weigh a microbatch by its share of the samples.
                found.append((name, value * denominators.sum_factor(value.dtype)))
        return found

    return {c.number: functools.partial(parts_of, c, rows) for c, rows in zip(calls, of_call, strict=True)}
