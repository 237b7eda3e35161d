"""Trains a model on this replica's part of every batch."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import smp_tf as smp
from tests.distributed.cases.equality import make_model, own_variables
from tests.distributed.cases.training import training_step
from tests.distributed.models import MODELS, STEPS


def train(model: str) -> dict[str, Any]:
    """Six optimizer steps; each of D replicas takes every D-th sample.

    Args:
        model: its name in the zoo.
    """
    entry = MODELS[model]
    entry.prepare()
    net = make_model(entry)
    optimizer = entry.optimizer()

    train_step = tf.function(training_step(entry, net, optimizer))
    for number in range(STEPS):
        part = [array[smp.dp_rank() :: smp.dp_size()] for array in entry.batch(number)]
        train_step(*map(tf.constant, part))
    return {"variables": own_variables(net), "replica": smp.dp_rank()}
