"""Trains a model of the zoo split over the processes, and says what each rank got."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import tensorflow as tf

import smp_tf as smp
from tests.distributed.cases.training import training_step
from tests.distributed.models import MODELS, STEPS, ZooModel
from tests.graphs_as_written import graphs_as_written


def make_model(entry: ZooModel) -> smp.DistributedModel:
    """Gives smp_tf the model in the form that the entry names."""
    if entry.form == "subclass":
        return entry.build(smp.DistributedModel)
    if entry.form == "builder":
        return smp.DistributedModel(lambda: entry.build(object))
    return smp.DistributedModel(entry.build(object))


def own_variables(model: smp.DistributedModel) -> dict[str, np.ndarray]:
    """Returns what this rank stores, by position in `model.variables`."""
    positions = {id(variable): index for index, variable in enumerate(model.variables)}
    return {str(positions[id(v)]): v.numpy() for v in model.local_variables}


def train(model: str, eager: bool = False, predicts: bool = True, as_written: bool = False) -> dict[str, Any]:
    """Six optimizer steps, then predictions on the first batch.

    Args:
        model: its name in the zoo.
        eager: call the step outside a tf.function.
        predicts: whether to make the predictions.
        as_written: whether TensorFlow leaves the graphs as they are.
    """
    with graphs_as_written() if as_written else nullcontext():
        return trained(MODELS[model], eager, predicts)


def trained(entry: ZooModel, eager: bool = False, predicts: bool = True) -> dict[str, Any]:
    """The same for an entry of any zoo."""
    entry.prepare()
    net = make_model(entry)
    optimizer = entry.optimizer()

    train_step = training_step(entry, net, optimizer)

    @smp.step
    def predict(inputs: Sequence[tf.Tensor]) -> Any:
        return entry.predict(net, inputs)

    run = train_step if eager else tf.function(train_step)
    losses = [run(*map(tf.constant, entry.batch(number))).numpy() for number in range(STEPS)]
    batch = entry.batch(0)
    inputs = tuple(map(tf.constant, batch[: len(batch) // 2]))
    outputs = tf.nest.flatten(predict(inputs)) if predicts else []
    return {
        "losses": np.array(losses),
        "variables": own_variables(net),
        "count": len(net.variables),
        "iterations": int(optimizer.iterations.numpy()),
        "predictions": [tf.cast(o.concat(), tf.float64).numpy() for o in outputs],
    }
