"""Tries on made-up values whether what microbatches count on their own averages to what the batch counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from smp_tf.partition.samples.sample_rows import SampleRows
from smp_tf.whole_batch.loss_gradient import LossGradient
from smp_tf.whole_batch.made_up_values import made_up
from smp_tf.whole_batch.own_samples import OwnSamples

#: How often losses are compared on made-up arguments.
_TRIALS = 4
#: What rounding may make of a number, relative to it, where it is more than in float32.
_ROUNDING = {tf.float16: 4e-3, tf.bfloat16: 3e-2}


def is_average(of_batch: LossGradient, of_microbatch: LossGradient, rows: SampleRows, samples: OwnSamples) -> bool:
    """Returns whether what microbatches count on their own averages to what the batch counts, on made-up values.

    Args:
        of_batch: the gradient of a loss for the whole batch.
        of_microbatch: the one that a microbatch has of it.
        rows: what the tensors of the whole batch's graph are made of.
        samples: of the whole batch, and which of them this replica has.
    """
    cuts, finite = of_batch.tail.cuts, False
    specs = of_batch.specs_of({*of_batch.arguments, *of_microbatch.arguments})
    for seed in range(_TRIALS):
        random = np.random.RandomState(seed)
        among = of_batch.compared_with if seed >= _TRIALS // 2 else ()
        made = {number: made_up(spec, random, among=among) for number, spec in specs.items()}
        states = {
            v.ref(): made_up(tf.TensorSpec(v.shape, v.dtype), random)
            for v in of_batch.variables + of_microbatch.variables
        }
        # Outputs may be of any sign, as logits are, or probabilities.
        values = [made_up(spec, random, is_share=seed % 2 == 1) for spec in of_batch.specs(samples.total)]
        try:
            whole = [value.numpy() for value in of_batch(made, values, states)]
        except tf.errors.OpError:
            if not among:
                raise
            continue  # Something that is compared cannot be one of these numbers, such as the number of a class.
        finite |= all(np.isfinite(value).all() for value in whole)
        begin = samples.begin
        for size in samples.parts:
            own = {n: _taken(v, rows.sample_axis(n), range(begin, begin + size)) for n, v in made.items()}
            at = [[b * samples.total + n for b in range(c.blocks) for n in range(begin, begin + size)] for c in cuts]
            given = [_taken(value, cut.axis, which) for cut, value, which in zip(cuts, values, at, strict=True)]
            given += of_microbatch.shapes(of_batch.graph, size, samples.total)
            for cut, of_all, of_part, rows_of in zip(cuts, whole, of_microbatch(own, given, states), at, strict=False):
                wanted, found = of_all, of_part.numpy()
                if cut.axis is not None:
                    wanted, found = np.take(of_all, rows_of, cut.axis) * samples.total, found * size
                if not _is_alike(wanted, found):
                    return False
            begin += size
    return finite


def _taken(value: np.ndarray, axis: int | None, which: Sequence[int]) -> np.ndarray:
    """Returns some rows along an axis; all where there is no such axis."""
    return value if axis is None else np.take(value, which, axis)


def _is_alike(one: np.ndarray, other: np.ndarray) -> bool:
    """Returns whether two arrays are the same but for rounding."""
    rounding = _ROUNDING.get(tf.as_dtype(one.dtype), 1e-4)
    one, other = one.astype(np.float64), other.astype(np.float64)
    most = np.max(np.abs(one), initial=0.0, where=np.isfinite(one))
    return np.allclose(one, other, rtol=rounding, atol=1e-2 * rounding * most, equal_nan=True)
