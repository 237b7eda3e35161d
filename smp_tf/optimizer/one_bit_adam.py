"""Adam whose variance is frozen after a warm-up. Then replicas exchange momenta with one bit per element."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from smp_tf.keras.bases import registered
from smp_tf.optimizer.one_bit import OneBitOptimizer


@registered
class OneBitAdam(OneBitOptimizer):
    """Adam for replicas on slow links.

    After a warm-up its variance is frozen, and momenta are sent in one bit each.

    With `"gradient_compression": "1bit"` the replicas average whole gradients during the warm-up, as for Adam.
    Afterwards each updates the momentum with its own gradient, and the momenta are averaged. Only signs, and a scale
    for every 1,024 elements, are sent. What is lost by this is added the next time. A weight (or element of one) whose
    gradients were zero in all of the warm-up stays as it is. Without that key, and with one replica, this is Adam with
    a variance that is frozen, and nothing is compressed.

    Momentum and variance are corrected for their initial zeros, as in Keras's Adam. The variance keeps the correction
    that it has when it is frozen. The paper has no correction. Where `beta_2 ** warmup_steps` is next to nothing, there
    is no difference.

    Source: Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", ICML
    2021, Algorithm 1.

    Args:
        learning_rate: a number, or a schedule of `tf.keras.optimizers.schedules`.
        beta_1: decay of the momentum per step, at least 0 and below 1.
        beta_2: decay of the variance per step of the warm-up, at least 0 and below 1.
        epsilon: added to the root of the variance.
        warmup_steps: steps with gradients that are sent whole, at least 1. The paper takes 15 to 25 % of all steps.
            Learning rates should not rise any more after them.
        weight_decay: share of each weight, times the learning rate, by which a step makes it smaller; None for none.
        name: name of the optimizer.
        **kwargs: none are allowed. Arguments that clip gradients in Keras's optimizers (such as `clipnorm`) are refused
            with a reason.

    Raises:
        ValueError: an argument is out of its range, or unknown.

    Example:
        >>> optimizer = smp.OneBitAdam(1e-3, warmup_steps=1000)
        >>> gradients, loss = forward_backward(images, labels)
        >>> averages = [gradient.accumulate() for gradient in gradients]
        >>> _ = optimizer.apply_gradients(zip(averages, model.trainable_variables))
    """

    # Files of compiled models name it.
    __module__ = "smp_tf.one_bit_adam"

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        warmup_steps: int = 1000,
        weight_decay: float | None = None,
        name: str = "OneBitAdam",
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, beta_1, beta_2, epsilon, warmup_steps, weight_decay, name, kwargs)

    def update_step(self, gradient: Any, variable: Any) -> None:
        """Updates momentum, variance and weight."""
        momentum, velocity = self._slots_of(variable)
        value, dtype = tf.convert_to_tensor(gradient), variable.dtype
        rate = 1.0 - self.beta_1
        momentum.assign_add(
            (value - momentum) * self._by_phase(rate, 1.0 if self._is_exchanged(variable) else rate, dtype)
        )
        velocity.assign_add((tf.square(value) - velocity) * self._by_phase(1.0 - self.beta_2, 0.0, dtype))
        power_1, power_2 = self._powers(dtype)
        alpha = tf.cast(self.learning_rate, dtype) * tf.sqrt(1 - power_2) / (1 - power_1)
        # Without a gradient in all of the warm-up, nothing says how far to go.
        change = tf.where(
            velocity > 0, (momentum * alpha) / (tf.sqrt(velocity) + self.epsilon), tf.zeros_like(momentum)
        )
        variable.assign_sub(change)
