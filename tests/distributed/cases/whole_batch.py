"""Trains with metrics, and with uses of gradients, that are none of single microbatches; says how far off it is."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
import tf_keras

import smp_tf as smp
from smp_tf.training.batch_function import BatchFunction
from tests.smp_tf.whole_batch import own_losses, own_optimizers
from tests.smp_tf.whole_batch.mixing_models import fitted
from tests.smp_tf.whole_batch.own_batches import fit_arguments
from tests.smp_tf.whole_batch.own_gradients import USES, Uses, compare
from tests.smp_tf.whole_batch.own_loops import batches, in_float64, net_of
from tests.smp_tf.whole_batch.own_metrics import metrics, net


class Padded(tf_keras.Model):
    """A model that looks at the first of two inputs."""

    def __init__(self) -> None:
        super().__init__(name="padded")
        self.net = net()

    def call(self, x: Any) -> Any:
        return self.net(x[0])


@in_float64()
def padded(pads: str) -> bool:
    """Whether a training, some of whose batches cannot be joined, has the additive metrics of plain Keras."""
    found = []
    for model in (Padded(), smp.DistributedModel(Padded)):
        model.build([(None, 6), (None, None)])
        model.set_weights(Uses.weights(((6, 8), (8,), (8, 3), (3,))))
        model.compile(tf_keras.optimizers.SGD(0.1), "mse", metrics=["mae", "RootMeanSquaredError"])
        given = fit_arguments(Uses.X, Uses.Y, is_split=bool(found), pads=pads)
        history = model.fit(**given, epochs=2, verbose=0).history
        found.append(np.concatenate([np.ravel(v) for v in [*history.values(), *model.get_weights()]]))
    return bool(np.allclose(found[1], found[0], rtol=1e-9, atol=1e-11))


@in_float64()
def gradients(use: str, pads: str = "") -> bool:
    """Whether weights and logs are those of plain Keras where a `train_step` makes something of its gradients."""
    return compare(USES[use], pads) < 1e-12


def recorded(use: str, folder: str) -> bool:
    """As `gradients`; leaves what ran when in a folder."""
    with smp.timeline(folder):
        return gradients(use)


@in_float64()
def mixing(name: str) -> None:
    """Trains a model that mixes samples, and evaluates it."""
    fitted(name, 10)


@in_float64()
def losses(loss: str) -> bool:
    """Whether a loss that is no average over samples trains as in plain Keras."""
    return own_losses.compare((own_losses.LOSSES | own_losses.COMPARING)[loss]) < 1e-12


@in_float64()
def losses_of_many_sizes(loss: str) -> list[Any]:
    """Whether a training trains as in plain Keras whose batches have many sizes; how often losses were looked at."""
    looks: list[Any] = []
    looked_at = BatchFunction._coefficients_for

    def counted(self: BatchFunction, *args: Any) -> Any:
        looks.append(args)
        return looked_at(self, *args)

    sizes = ((12, 8), (9, 8), (8, 7), (7, 5), (5, 6))
    found = []
    with mock.patch.object(BatchFunction, "_coefficients_for", counted):
        for base in (tf_keras.Model, smp.DistributedModel):
            replica = smp.dp_rank() if base is smp.DistributedModel else None
            model = net_of(base)
            model.build((None, 6))
            model.set_weights(Uses.weights(((6, 8), (8,), (8, 8), (8,), (8, 3), (3,))))
            model.compile(tf_keras.optimizers.SGD(0.01), (own_losses.LOSSES | own_losses.COMPARING)[loss])
            parts = [tf.data.Dataset.from_tensors(batch) for batch in batches(sizes, replica)]
            data = functools.reduce(lambda one, other: one.concatenate(other), parts)
            history = model.fit(data, epochs=2, verbose=0).history
            found.append(np.concatenate([np.ravel(value) for value in [history["loss"], *model.get_weights()]]))
    return [bool(np.allclose(*found, rtol=1e-10, atol=1e-12)), len(looks)]


@in_float64()
def optimizer(name: str) -> bool:
    """Whether an optimizer's own code makes of all gradients what it makes of them in plain Keras."""
    return own_optimizers.compare(own_optimizers.OPTIMIZERS[name]) < 1e-12


@in_float64()
def history_over_replicas() -> bool:
    """Whether metrics after each batch are those of plain Keras, which sees the batches of all replicas joined."""
    found = []
    plain = net()
    labels = (Uses.Y > 0).astype(float)
    for model in (plain, smp.DistributedModel(lambda: tf_keras.models.clone_model(plain))):
        seen: list[Any] = []
        model.build((None, 6))
        model.set_weights(Uses.weights(((6, 8), (8,), (8, 3), (3,))))
        model.compile(tf_keras.optimizers.SGD(0.1), "mse", metrics=metrics())
        after_each = tf_keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, seen=seen: seen.append(sorted(logs.items()))
        )
        given = fit_arguments(Uses.X, labels, is_split=model is not plain)
        history = model.fit(**given, epochs=2, verbose=0, callbacks=[after_each]).history
        seen += [sorted(history.items()), model.get_weights()]
        numbers = [value for value in tf.nest.flatten(seen) if not isinstance(value, str)]
        found.append(np.concatenate([np.ravel(value) for value in numbers]))
    return bool(np.allclose(found[1], found[0], rtol=1e-9, atol=1e-11, equal_nan=True))


@in_float64()
def history() -> bool:
    """Whether all metrics of `fit` and `evaluate` are those of plain Keras, of which this replica sees all batches."""
    found = []
    plain = net()
    for model in (plain, smp.DistributedModel(lambda: tf_keras.models.clone_model(plain))):
        model.build((None, 6))
        model.set_weights(Uses.weights(((6, 8), (8,), (8, 3), (3,))))
        model.compile(tf_keras.optimizers.SGD(0.1), "mse", metrics=metrics())
        seen: list[Any] = [
            model.fit(Uses.X, (Uses.Y > 0).astype(float), batch_size=21, epochs=2, shuffle=False, verbose=0).history,
            model.evaluate(Uses.X, (Uses.Y > 0).astype(float), batch_size=15, verbose=0),
        ]
        found.append(np.array([float(value) for value in tf.nest.flatten(seen)]))
    return bool(np.allclose(found[1], found[0], rtol=1e-9, atol=1e-11, equal_nan=True))
