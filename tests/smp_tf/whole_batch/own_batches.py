"""The same samples as batches of every replica, of other sizes each, and as the batches of one process."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf

import smp_tf as smp

#: Samples of the batches of each replica.
SIZES = ((12, 12, 3), (8, 8, 1))


#: Widths of what pads the batches of each replica, where these are alike, where the last ones differ, and where all do.
PADS = {"alike": ((2, 2, 2), (2, 2, 2)), "later": ((2, 2, 3), (2, 2, 4)), "unlike": ((2, 2, 2), (3, 3, 3))}


def fit_arguments(x: np.ndarray, y: np.ndarray, *, is_split: bool, pads: str = "") -> dict[str, Any]:
    """What `fit` is given so that all replicas together train as one process does.

    Args:
        x: inputs, as many as all replicas have samples.
        y: labels.
        is_split: whether it is for this replica, in place of one process for all.
        pads: which of `PADS` comes next to the inputs, as a second one; nothing for none.
    """
    if smp.dp_size() == 1:
        return {"x": x, "y": y, "batch_size": 21, "shuffle": False}
    sizes = SIZES[: smp.dp_size()]
    begin, parts = 0, []
    for number, of_all in enumerate(zip(*sizes, strict=True)):
        ends = begin + np.cumsum(of_all)
        mine = slice(ends[smp.dp_rank()] - of_all[smp.dp_rank()], ends[smp.dp_rank()])
        where = mine if is_split else slice(begin, ends[-1])
        width = PADS[pads][smp.dp_rank() if is_split else 0][number] if pads else 0
        given = (x[where], np.zeros([len(x[where]), width])) if pads else x[where]
        parts.append(tf.data.Dataset.from_tensors((given, y[where])))
        begin = ends[-1]
    return {"x": functools.reduce(lambda one, other: one.concatenate(other), parts)}
