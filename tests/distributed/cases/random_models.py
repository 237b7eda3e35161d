"""Trains a random model split over the processes; each replica takes its share of every batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import smp_tf as smp
from smp_tf.errors import PlacementError
from tests.distributed.cases.equality import make_model, own_variables
from tests.distributed.cases.training import training_step
from tests.distributed.random_models import STEPS, RandomModel


def train(model: dict[str, Any]) -> dict[str, Any]:
    """Some optimizer steps.

    Args:
        model: as `RandomModel.as_json` told it.
    """
    spec = RandomModel.of(model)
    entry = spec.entry()
    entry.prepare()
    net = make_model(entry)
    train_step = training_step(entry, net, entry.optimizer())
    run = train_step if spec.eager else tf.function(train_step)
    losses = []
    for step in range(STEPS):
        share = [np.array_split(array, smp.dp_size())[smp.dp_rank()] for array in entry.batch(step)]
        try:
            loss = run(*map(tf.constant, share))
        except PlacementError as error:
            return {"refused": str(error)}
        losses.append(loss.numpy())
    return {"losses": np.array(losses), "variables": own_variables(net), "replica": smp.dp_rank()}
