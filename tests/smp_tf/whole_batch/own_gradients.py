"""Models whose `train_step` makes something of its gradients, as scripts do, in plain Keras and split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from tests.smp_tf.whole_batch.own_batches import fit_arguments

#: Given gradients, weights, the loss and a variable of the model's, gives what is applied, and logs.
Use = Callable[[Sequence[Any], Sequence[Any], Any, Any], Any]


class Uses:
    """The data that models are trained on."""

    RANDOM = np.random.RandomState(0)
    X = RANDOM.randn(44, 6)
    Y = RANDOM.randn(44, 3)

    @staticmethod
    def weights(shapes: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Returns the same weights every time."""
        random = np.random.RandomState(1)
        return [0.3 * random.randn(*shape) for shape in shapes]


def clipped_and_logged(gradients: Any, weights: Any, loss: Any, state: Any) -> Any:
    gradients, norm = tf.clip_by_global_norm(gradients, 0.2)
    return gradients, {"norm": norm, "largest": tf.reduce_max(tf.abs(gradients[0]))}


def logged(gradients: Any, weights: Any, loss: Any, state: Any) -> Any:
    return gradients, {"norm": tf.linalg.global_norm(gradients)}


def clipped_by_value(gradients: Any, weights: Any, loss: Any, state: Any) -> Any:
    return [tf.clip_by_value(g, -0.01, 0.01) for g in gradients], {}


def scaled_by_the_loss(gradients: Any, weights: Any, loss: Any, state: Any) -> Any:
    return [g * loss for g in gradients], {}


def adaptive(gradients: Any, weights: Any, loss: Any, state: Any) -> Any:
    """Adaptive gradient clipping: by the norm of each weight."""
    made = []
    for gradient, weight in zip(gradients, weights, strict=True):
        most, norm = 0.01 * tf.maximum(tf.norm(weight), 1e-3), tf.norm(gradient)
        made.append(tf.where(norm > most, gradient * most / norm, gradient))
    return made, {}


def in_two_rounds(gradients: Any, weights: Any, loss: Any, state: Any) -> Any:
    """The norms are averaged over all layers, and what was scaled by that is normalised once more."""
    norms = [tf.norm(g) for g in gradients]
    average = tf.add_n(norms) / len(norms)
    gradients = [g * tf.minimum(tf.ones_like(n), average / n) for g, n in zip(gradients, norms, strict=True)]
    return [g / tf.linalg.global_norm(gradients) for g in gradients], {"average": average}


def signed_roots(gradients: Any, weights: Any, loss: Any, state: Any) -> Any:
    central = [g - tf.reduce_mean(g, 0, keepdims=True) for g in gradients]
    return [tf.sign(g) * tf.sqrt(tf.abs(g)) for g in central], {}


def of_all_in_a_row(gradients: Any, weights: Any, loss: Any, state: Any) -> Any:
    """Only the ten largest entries of all gradients are applied."""
    entries = tf.sort(tf.abs(tf.concat([tf.reshape(g, [-1]) for g in gradients], 0)))
    return [tf.where(tf.abs(g) >= entries[-10], g, tf.zeros_like(g)) for g in gradients], {"tenth": entries[-10]}


USES: dict[str, Use] = {
    use.__name__: use
    for use in (
        *(clipped_and_logged, logged, clipped_by_value, scaled_by_the_loss),
        *(adaptive, in_two_rounds, signed_roots, of_all_in_a_row),
    )
}


def model_with(base: type, use: Use) -> Any:
    """Returns a model of three layers whose `train_step` applies, and logs, what a function makes of its gradients."""

    class Net(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__(name="net")
            self.first, self.second = layers.Dense(8, activation="tanh"), layers.Dense(8)
            self.third = layers.Dense(3)

        def call(self, x: Any) -> Any:
            # A second input pads the batch.
            return self.third(self.second(self.first(x[0] if isinstance(x, tuple) else x)))

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
            weights = self.trainable_variables
            gradients, logs = use(tape.gradient(loss, weights), weights, loss, KEPT[id(self)])
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
            return {"loss": loss, **logs}

    return Net()


#: A variable of the script's for each model, which is none of the model's.
KEPT: dict[int, tf.Variable] = {}


def compare(use: Use, pads: str = "") -> float:
    """Trains in plain Keras and split; returns the largest difference of weights and logs, relative to one.

    Args:
        use: what the models make of their gradients.
        pads: what pads the batches.
    """
    found = []
    for base in (tf_keras.Model, smp.DistributedModel):
        model = model_with(base, use)
        KEPT[id(model)] = tf.Variable(0.1, trainable=False, dtype=tf.float64)
        model.build((None, 6))
        model.set_weights(Uses.weights(((6, 8), (8,), (8, 8), (8,), (8, 3), (3,))))
        model.compile(tf_keras.optimizers.SGD(0.1))
        given = fit_arguments(Uses.X, Uses.Y, is_split=base is smp.DistributedModel, pads=pads)
        history = model.fit(**given, epochs=2, verbose=0).history
        found.append([*model.get_weights(), *(np.asarray(history[key]) for key in sorted(history))])
    return max(
        float(np.abs(one - other).max() / max(1.0, np.abs(other).max())) for one, other in zip(*found, strict=True)
    )
