"""The same samples as batches of every replica, of other sizes each, and as the batches of one process."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf

import smp_tf as smp

#: Samples of the batches of each replica.
SIZES = ((12, 12, 3), (8, 8, 1))


def fit_arguments(x: np.ndarray, y: np.ndarray, *, is_split: bool) -> dict[str, Any]:
    """What `fit` is given so that all replicas together train as one process does.

    Args:
        x: inputs, as many as all replicas have samples.
        y: labels.
        is_split: whether it is for this replica, in place of one process for all.
    """
    if smp.dp_size() == 1:
        return {"x": x, "y": y, "batch_size": 21, "shuffle": False}
    sizes = SIZES[: smp.dp_size()]
    begin, parts = 0, []
    for of_all in zip(*sizes, strict=True):
        ends = begin + np.cumsum(of_all)
        mine = slice(ends[smp.dp_rank()] - of_all[smp.dp_rank()], ends[smp.dp_rank()])
        where = mine if is_split else slice(begin, ends[-1])
        parts.append(tf.data.Dataset.from_tensors((x[where], y[where])))
        begin = ends[-1]
    return {"x": functools.reduce(lambda one, other: one.concatenate(other), parts)}
