"""All scripts by their kinds, and a comparison of one of them with plain Keras."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tf_keras

import smp_tf as smp
from tests.distributed.siblings import gradients, masks, mixtures, optimizers, states, sums, trackers
from tests.distributed.siblings.script import Keras, Script
from tests.smp_tf.whole_batch.own_loops import in_float64

#: By kind and name.
SIBLINGS: Mapping[str, Mapping[str, Script]] = {
    "sums": sums.SIBLINGS,
    "trackers": trackers.SIBLINGS,
    "gradients": gradients.SIBLINGS,
    "optimizers": optimizers.SIBLINGS,
    "masks": masks.SIBLINGS,
    "states": states.SIBLINGS,
    "mixtures": mixtures.SIBLINGS,
}


def difference(kind: str, name: str) -> tuple[float, str]:
    """Runs a script with plain Keras and split, in float64.

    Returns:
        The largest difference of all that it gives, relative to one where that is larger, and the name of what differs.
    """
    script = SIBLINGS[kind][name]
    with in_float64():
        wanted, found = script(Keras(tf_keras.Model)), script(Keras(smp.DistributedModel))
    assert sorted(wanted) == sorted(found), (sorted(wanted), sorted(found))
    return max((_apart(found[key], wanted[key]), key) for key in wanted)


def _apart(found: Any, wanted: Any) -> float:
    found, wanted = np.asarray(found, float), np.asarray(wanted, float)
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    if not np.isfinite(found).all():
        return float("inf")
    return float(np.abs(found - wanted).max() / max(1.0, np.abs(wanted).max()))
