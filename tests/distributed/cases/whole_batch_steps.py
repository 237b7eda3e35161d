"""Trains by loops of a script's own with `@smp.step(whole_batch=True)`; says how far off plain Keras it is."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

import smp_tf as smp
from smp_tf.errors import StepError
from tests.smp_tf.whole_batch import own_losses
from tests.smp_tf.whole_batch.own_gradients import USES, Uses
from tests.smp_tf.whole_batch.own_loops import (
    batches,
    compare,
    counting,
    f1,
    in_float64,
    mean,
    net_of,
    penalised,
    training,
    value_of,
    with_local_outputs,
)

LOSSES = {"mean": mean, **own_losses.LOSSES, **own_losses.COMPARING}


#: Samples of the batches of two replicas: of unequal sizes, and fewer than microbatches.
OF_REPLICAS = ((12, 8), (9, 8), (12, 12), (11, 8), (3, 1))
#: Those of three.
OF_THREE = ((7, 6, 8), (5, 7, 4), (8, 8, 8), (1, 3, 2))


def trained(loss: str, use: str, eager: bool, most: int = len(OF_REPLICAS)) -> bool:
    """Whether a loop trains, and logs, as one process does; on replicas with at most so many batches."""
    sizes = {1: (21, 20, 3, 1), 2: OF_REPLICAS[:most], 3: OF_THREE[:most]}[smp.dp_size()]
    with in_float64():
        return compare(training(LOSSES[loss], USES[use]), eager=eager, sizes=sizes) < 1e-12


def with_penalty() -> bool:
    """Whether a loop with a gradient penalty trains, and logs, as one process does."""
    with in_float64():
        return compare(penalised, sizes=(21, 20, 3, 1) if smp.dp_size() == 1 else OF_REPLICAS) < 1e-12


def counted() -> bool:
    """Whether a loop trains, whose loss has a weight that the step counts up, and logs, as one process does."""
    with in_float64():
        return compare(counting, sizes=(21, 20, 3) if smp.dp_size() == 1 else OF_REPLICAS[:2]) < 1e-12


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


@in_float64()
def of_two_forms() -> bool:
    """Whether a step trains as in one process that is given weights of samples in every other call."""
    found = []
    for base in (tf_keras.Model, smp.DistributedModel):
        replica = smp.dp_rank() if base is smp.DistributedModel else None
        model, optimizer, seen = net_of(base), tf_keras.optimizers.SGD(0.05), []
        model.build((None, 6))
        model.set_weights(Uses.weights(((6, 8), (8,), (8, 8), (8,), (8, 3), (3,))))
        step = forward_backward_of(model)
        step = smp.step(step, whole_batch=True) if base is smp.DistributedModel else step
        for number, (x, y) in enumerate(batches(OF_REPLICAS, replica)):
            gradients, logs = step(x, y, tf.abs(x[:, 0])) if number % 2 else step(x, y)
            gradients, logs = tf.nest.map_structure(value_of, (gradients, logs))
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            seen += tf.nest.flatten(logs)
        found.append(np.concatenate([np.ravel(value) for value in [*seen, *model.get_weights()]]))
    return bool(np.allclose(*found, rtol=1e-11, atol=1e-13))


def forward_backward_of(model: Any) -> Any:
    """Returns the function of a step whose gradients are clipped, by a loss that may weigh samples."""

    def forward_backward(x: Any, y: Any, weights: Any = None) -> Any:
        with tf.GradientTape() as tape:
            each = tf.reduce_mean(tf.square(y - model(x)), -1)
            loss = tf.reduce_mean(each)
            if weights is not None:
                loss = tf.reduce_sum(each * weights) / tf.reduce_sum(weights)
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, model.trainable_variables), 0.2)
        return gradients, {"loss": loss, "norm": norm, "largest": tf.reduce_max(each)}

    return forward_backward


@in_float64()
def called_twice() -> bool:
    """Whether a function trains, and logs, as in one process that calls a step twice, as sharpness-aware steps do."""
    found = []
    for base in (tf_keras.Model, smp.DistributedModel):
        replica = smp.dp_rank() if base is smp.DistributedModel else None
        model = net_of(base)
        model.build((None, 6))
        model.set_weights(Uses.weights(((6, 8), (8,), (8, 8), (8,), (8, 3), (3,))))
        step = forward_backward_of(model)
        step = smp.step(step, whole_batch=True) if base is smp.DistributedModel else step
        train = tf.function(functools.partial(twice, step, model))
        seen = [train(x, y, tf.abs(x[:, 0])) for x, y in batches(OF_REPLICAS[:2], replica)]
        found.append(np.concatenate([np.ravel(value) for value in [*tf.nest.flatten(seen), *model.get_weights()]]))
    return bool(np.allclose(*found, rtol=1e-11, atol=1e-13))


def twice(step: Any, model: Any, *batch: Any) -> list[Any]:
    """Takes gradients and goes along them, and does so once more where this has led; returns the logs."""
    logs = []
    for _ in range(2):
        gradients, seen = tf.nest.map_structure(value_of, step(*batch))
        for weight, gradient in zip(model.trainable_variables, gradients, strict=True):
            weight.assign_sub(gradient)
        logs.append(seen)
    return logs


@in_float64()
def other_axis() -> list[bool]:
    """Whether results are right where samples lie along another axis; outputs stay with their replica."""
    model, found = net_of(smp.DistributedModel), []

    def forward(x: Any, y: Any) -> Any:
        p = model(x)
        return {"f1": f1(tf.transpose(y), p), "outputs": p}

    step = smp.step(forward, whole_batch=True, input_split_axes={"y": 1}, local_outputs=["outputs"])
    for mine, (x, y) in zip(batches(OF_REPLICAS, smp.dp_rank()), batches(OF_REPLICAS), strict=True):
        results = step(mine[0], tf.transpose(mine[1]))
        found.append(np.allclose(results["f1"].reduce_mean(), f1(y, model.call(x)), rtol=1e-12))
        found.append(np.allclose(results["outputs"].outputs[0], model.call(mine[0]), rtol=1e-12))
    return [bool(is_right) for is_right in found]


@in_float64()
def sized() -> list[Any]:
    """Whether a loss that needs the number of samples in Python trains, and the words where this changes."""

    def of_pairs(y: Any, p: Any) -> Any:
        return tf.reduce_sum(tf.square(tf.matmul(p, y, transpose_b=True) - tf.eye(p.shape[0], dtype=p.dtype)))

    make, sizes = training(of_pairs), ((12, 8),) * 2
    found: list[Any] = [compare(make, eager=eager, sizes=sizes) < 1e-12 for eager in (True, False)]
    try:
        compare(make, sizes=((12, 8), (12, 4)))
    except (ValueError, tf.errors.OpError, RuntimeError) as error:
        found.append(str(error))
    return found


@in_float64()
def refused(what: str) -> str:
    """The words with which replicas' batches are refused that cannot be joined."""
    model = net_of(smp.DistributedModel)
    x, y = batches(((8, 8),), smp.dp_rank())[0]
    step: Any
    if what == "ragged":
        numbers = tf.RaggedTensor.from_row_lengths(tf.ones([16], tf.float64), [2] * 8)
        step = smp.step(lambda x, r: tf.reduce_sum(model(x)) * tf.reduce_max(r.values), whole_batch=True)
        given = x, numbers
    else:
        step = smp.step(lambda x, y: f1(y[:, :3], model(x)), whole_batch=True)
        given = x, tf.pad(y, [[0, 0], [0, smp.dp_rank()]])
    try:
        step(*given)
    except StepError as error:
        return str(error)
    return ""
