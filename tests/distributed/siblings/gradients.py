"""What a `train_step` makes of its gradients before it applies them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
import tf_keras

from tests.distributed.siblings.script import Data, Keras, Script, trained

#: Given the model, its gradients and its weights, gives what is applied, and logs.
Use = Callable[[Any, Sequence[Any], Sequence[Any]], tuple[Sequence[Any], Mapping[str, Any]]]


def with_use(keras: Keras, use: Use, prepare: Callable[[Any], None] = lambda model: None) -> Mapping[str, Any]:
    """Trains a model whose `train_step` applies what a function makes of its gradients."""

    class Net(keras.own()):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            weights = self.trainable_variables
            applied, logs = use(self, tape.gradient(loss, weights), weights)
            self.optimizer.apply_gradients(zip(applied, weights, strict=True))
            return {"loss": loss, **logs}

    model = Net()
    model.build((None, 6))
    prepare(model)
    model.compile(tf_keras.optimizers.SGD(0.1, momentum=0.5), "mse")
    return trained(model, Data.X, Data.Y)


def centralised(keras: Keras) -> Mapping[str, Any]:
    """Gradient centralisation, then clipping by the norm of all; both norms are logged."""

    def use(model: Any, gradients: Any, weights: Any) -> Any:
        before = tf.linalg.global_norm(gradients)
        central = [g - tf.reduce_mean(g, axis=0, keepdims=True) if g.shape.rank > 1 else g for g in gradients]
        clipped, after = tf.clip_by_global_norm(central, 0.15)
        return clipped, {"before": before, "after": after}

    return with_use(keras, use)


def adaptive_by_unit(keras: Keras) -> Mapping[str, Any]:
    """Adaptive clipping, a unit at a time, as NFNets have it; the share of units that were clipped is logged."""

    def norms(value: Any) -> Any:
        axes = list(range(value.shape.rank - 1)) or None
        return tf.sqrt(tf.reduce_sum(tf.square(value), axis=axes, keepdims=True))

    def use(model: Any, gradients: Any, weights: Any) -> Any:
        made, shares = [], []
        for gradient, weight in zip(gradients, weights, strict=True):
            most, norm = 0.02 * tf.maximum(norms(weight), 1e-3), norms(gradient)
            made.append(tf.where(norm > most, gradient * (most / tf.maximum(norm, 1e-6)), gradient))
            shares.append(tf.reduce_mean(tf.cast(norm > most, tf.float64)))
        return made, {"clipped": tf.reduce_mean(tf.stack(shares))}

    return with_use(keras, use)


def noise_scale(keras: Keras) -> Mapping[str, Any]:
    """The scale of gradient noise, of the norms for a half of the batch and for all of it."""

    class Net(keras.own()):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape(persistent=True) as tape:
                each = tf.reduce_mean(tf.square(y - self(x, training=True)), -1)
                samples = tf.shape(each)[0]
                is_first = tf.cast(tf.range(samples) < samples // 2, each.dtype)
                loss = tf.reduce_mean(each)
                of_half = tf.reduce_sum(each * is_first) / tf.reduce_sum(is_first)
            weights = self.trainable_variables
            gradients, halves = tape.gradient(loss, weights), tape.gradient(of_half, weights)
            big, small = (tf.square(tf.linalg.global_norm(g)) for g in (gradients, halves))
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
            return {"loss": loss, "noise": 2.0 * (small - big), "signal": 2.0 * big - small}

    model = Net()
    model.compile(tf_keras.optimizers.SGD(0.1))
    return trained(model, Data.X, Data.Y)


def by_history(keras: Keras) -> Mapping[str, Any]:
    """Clips what is far from the moving average of norms, by moments that the script keeps."""
    mean, square = (tf.Variable(value, trainable=False, dtype=tf.float64) for value in (0.3, 0.1))

    def use(model: Any, gradients: Any, weights: Any) -> Any:
        norm = tf.linalg.global_norm(gradients)
        spread = tf.sqrt(tf.maximum(square - tf.square(mean), 1e-12))
        factor = tf.minimum(tf.ones_like(norm), (mean + spread) / norm)
        kept = norm * factor
        mean.assign(0.8 * mean + 0.2 * kept)
        square.assign(0.8 * square + 0.2 * tf.square(kept))
        return [g * factor for g in gradients], {"norm": norm, "mean": mean.read_value(), "spread": spread}

    return with_use(keras, use)


def by_history_of_the_model(keras: Keras) -> Mapping[str, Any]:
    """The moving average of norms is a variable of the model, which goes into its files with the weights."""

    def prepare(model: Any) -> None:
        model.norms = tf.Variable(0.3, trainable=False, dtype=tf.float64, name="norms")
        model.steps = tf.Variable(0, trainable=False, dtype=tf.int64, name="steps")

    def use(model: Any, gradients: Any, weights: Any) -> Any:
        norm = tf.linalg.global_norm(gradients)
        model.norms.assign(0.9 * model.norms + 0.1 * norm)
        model.steps.assign_add(1)
        corrected = model.norms / (1.0 - tf.pow(tf.constant(0.9, tf.float64), tf.cast(model.steps, tf.float64)))
        return [g * tf.minimum(tf.ones_like(norm), corrected / norm) for g in gradients], {
            "norm": norm,
            "corrected": corrected,
        }

    return with_use(keras, use, prepare)


def signs_of_momentum(keras: Keras) -> Mapping[str, Any]:
    """Signs of momenta that the script keeps, one of each weight's shape."""
    momenta: list[Any] = []

    def prepare(model: Any) -> None:
        momenta.extend(tf.Variable(tf.zeros(w.shape, w.dtype), trainable=False) for w in model.trainable_variables)

    def use(model: Any, gradients: Any, weights: Any) -> Any:
        made = []
        for gradient, momentum in zip(gradients, momenta, strict=True):
            made.append(tf.sign(0.9 * momentum + 0.1 * gradient) * 0.05)
            momentum.assign(0.99 * momentum + 0.01 * gradient)
        return made, {}

    return with_use(keras, use, prepare)


def of_two_tasks(keras: Keras) -> Mapping[str, Any]:
    """Where gradients of two tasks point apart, each loses what is against the other (PCGrad)."""

    class Net(keras.own()):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape(persistent=True) as tape:
                p = self(x, training=True)
                one = tf.reduce_mean(tf.square(y[:, :1] - p[:, :1]))
                other = tf.reduce_mean(tf.abs(y[:, 1:] - p[:, 1:]))
            weights = self.trainable_variables
            first, second = tape.gradient(one, weights), tape.gradient(other, weights)
            dot = tf.add_n([tf.reduce_sum(a * b) for a, b in zip(first, second, strict=True)])
            against = tf.minimum(dot, 0.0)
            of_first, of_second = (tf.add_n([tf.reduce_sum(g * g) for g in gs]) for gs in (first, second))
            made = [
                a - against / of_second * b + b - against / of_first * a for a, b in zip(first, second, strict=True)
            ]
            self.optimizer.apply_gradients(zip(made, weights, strict=True))
            return {"one": one, "other": other, "cosine": dot / tf.sqrt(of_first * of_second)}

    model = Net()
    model.compile(tf_keras.optimizers.SGD(0.1))
    return trained(model, Data.X, Data.Y)


def sparsified(keras: Keras) -> Mapping[str, Any]:
    """The largest tenth of each gradient is applied; what is left is kept for the next batch (error feedback)."""
    left: list[Any] = []

    def prepare(model: Any) -> None:
        left.extend(tf.Variable(tf.zeros(w.shape, w.dtype), trainable=False) for w in model.trainable_variables)

    def use(model: Any, gradients: Any, weights: Any) -> Any:
        made = []
        for gradient, kept in zip(gradients, left, strict=True):
            whole = gradient + kept
            sizes = tf.sort(tf.abs(tf.reshape(whole, [-1])), direction="DESCENDING")
            least = sizes[max(1, int(sizes.shape[0]) // 10) - 1]
            chosen = tf.where(tf.abs(whole) >= least, whole, tf.zeros_like(whole))
            kept.assign(whole - chosen)
            made.append(chosen)
        return made, {"zeros": tf.reduce_mean(tf.stack([tf.cast(tf.math.zero_fraction(g), tf.float64) for g in made]))}

    return with_use(keras, use, prepare)


SIBLINGS: dict[str, Script] = {
    script.__name__: script
    for script in (
        *(centralised, adaptive_by_unit, noise_scale, by_history),
        *(signs_of_momentum, of_two_tasks, sparsified),
    )
}
