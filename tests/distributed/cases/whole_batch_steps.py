"""Trains by loops of a script's own with `@smp.step(whole_batch=True)`; says how far off plain Keras it is."""

from __future__ import annotations

from typing import Any

import numpy as np

import smp_tf as smp
from smp_tf.errors import StepError
from tests.smp_tf.whole_batch import own_losses
from tests.smp_tf.whole_batch.own_gradients import USES
from tests.smp_tf.whole_batch.own_loops import (
    batches,
    compare,
    f1,
    in_float64,
    mean,
    net_of,
    penalised,
    training,
    with_local_outputs,
)

LOSSES = {"mean": mean, **own_losses.LOSSES, **own_losses.COMPARING}


def trained(loss: str, use: str, eager: bool) -> bool:
    """Whether a loop trains, and logs, as one process does."""
    with in_float64():
        return compare(training(LOSSES[loss], USES[use]), eager=eager, sizes=(21, 20, 3, 1)) < 1e-12


def with_penalty() -> bool:
    """Whether a loop with a gradient penalty trains, and logs, as one process does."""
    with in_float64():
        return compare(penalised, sizes=(21, 20, 3, 1)) < 1e-12


def local_outputs() -> dict[str, Any]:
    """Whether outputs stay on the last stage, and whether they are right there."""
    with in_float64():
        model = net_of(smp.DistributedModel)
        x, y = batches()[0]
        results = with_local_outputs(model)(x, y)
        outputs = results["outputs"]
        score = float(results["f1"].reduce_mean())
        whole = float(f1(y, outputs.concat())) if outputs.is_local else score
        return {"is local": outputs.is_local, "is right": bool(np.isclose(score, whole, rtol=1e-12))}


def replicas() -> str:
    """The words with which several replicas are refused."""
    with in_float64():
        model = net_of(smp.DistributedModel)
        try:
            smp.step(lambda x: model(x), whole_batch=True)(batches()[0][0])
        except StepError as error:
            return str(error)
        return ""
