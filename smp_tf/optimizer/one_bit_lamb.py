"""LAMB whose variance and layerwise coefficients are frozen after a warm-up, except for a factor per layer.

    warm-up      coefficient = |weight| / |update|                            averaged over the steps: c
    afterwards   coefficient = c x how much the variance has grown smaller    as far as what is sent tells it

The factor is made from the gradient by which two momenta differ. Every replica knows it, so nothing more is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smp_tf.keras.bases import registered
from smp_tf.optimizer.one_bit import OneBitOptimizer


@registered
class OneBitLAMB(OneBitOptimizer):
    """LAMB for replicas on slow links and large batches.

    It is to LAMB what `smp.OneBitAdam` is to Adam.

    As with `smp.OneBitAdam`, and with `"gradient_compression": "1bit"`, the replicas average whole gradients during a
    warm-up, and momenta with one bit per element afterwards. Without that key nothing is compressed. LAMB scales the
    update of each weight by a coefficient. After the warm-up the coefficient is its average over the warm-up, times a
    factor. The factor is the largest ratio of the root of the frozen variance to the root of one that still follows the
    gradients. A weight (or element of one) whose gradients were zero in all of the warm-up stays as it is, except for
    its decay.

    Momentum, variances and the average of the coefficient are corrected for their initial zeros, the frozen ones as
    they were then. The paper's scale for the momenta of each weight is not needed, since blocks have their own scales.

    Source: Li et al., "1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's Convergence
    Speed", HiPC 2022 (arXiv 2104.06069), Algorithm 1; the share of decay in the factor as in DeepSpeed.

    Args:
        learning_rate: a number, or a schedule of `tf.keras.optimizers.schedules`.
        beta_1: decay of the momentum per step, at least 0 and below 1.
        beta_2: decay of the variance per step, at least 0 and below 1.
        epsilon: added to the root of the variance.
        weight_decay: share of each weight that is added to its update, before this is scaled.
        warmup_steps: steps with gradients that are sent whole, at least 1.
        max_coefficient: the largest coefficient of a weight in the warm-up.
        min_coefficient: the smallest coefficient of a weight in the warm-up.
        coefficient_beta: decay of the coefficient's average per step, at least 0 and below 1.
        max_factor: the largest factor of a weight.
        min_factor: the smallest factor of a weight.
        factor_threshold: the largest share of itself by which the factor changes in a step.
        name: name of the optimizer.
        **kwargs: none are allowed. Arguments that clip gradients in Keras's optimizers (such as `clipnorm`) are refused
            with a reason.

    Raises:
        ValueError: an argument is out of its range, or unknown.

    Example:
        >>> optimizer = smp.OneBitLAMB(1e-2, weight_decay=0.01, warmup_steps=1000)
        >>> optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
        >>> model.compile(optimizer, "mse")
    """

    # Files of compiled models name it.
    __module__ = "smp_tf.one_bit_lamb"

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        weight_decay: float = 0.0,
        warmup_steps: int = 1000,
        max_coefficient: float = 10.0,
        min_coefficient: float = 0.01,
        coefficient_beta: float = 0.9,
        max_factor: float = 4.0,
        min_factor: float = 0.5,
        factor_threshold: float = 0.1,
        name: str = "OneBitLAMB",
        **kwargs: Any,
    ) -> None:
        # Keras's own decay is not a part of the update, which is scaled as a whole here.
        super().__init__(learning_rate, beta_1, beta_2, epsilon, warmup_steps, None, name, kwargs)
        if not 0.0 <= coefficient_beta < 1.0:
            raise ValueError(
                f"coefficient_beta of OneBitLAMB must be at least 0 and below 1. Received: "
                f"coefficient_beta={coefficient_beta!r}"
            )
        for kind, least, most in (
            ("coefficient", min_coefficient, max_coefficient),
            ("factor", min_factor, max_factor),
        ):
            if not 0.0 < least <= most:
                raise ValueError(
                    f"min_{kind} of OneBitLAMB must be above 0 and at most max_{kind}. Received: min_{kind}={least!r}, "
                    f"max_{kind}={most!r}"
                )
        self.decay_of_update = weight_decay
        self.max_coefficient = max_coefficient
        self.min_coefficient = min_coefficient
        self.coefficient_beta = coefficient_beta
        self.max_factor = max_factor
        self.min_factor = min_factor
        self.factor_threshold = factor_threshold

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make the same optimizer again."""
        return super().get_config() | {
            "weight_decay": self.decay_of_update,
            "max_coefficient": self.max_coefficient,
            "min_coefficient": self.min_coefficient,
            "coefficient_beta": self.coefficient_beta,
            "max_factor": self.max_factor,
            "min_factor": self.min_factor,
            "factor_threshold": self.factor_threshold,
        }

    def _build_more(self, var_list: Sequence[Any]) -> None:
        self._fresh = [self.add_variable_from_reference(v, "v_fresh") for v in var_list]
        self._coefficients = [self.add_variable_from_reference(v, "coefficient", shape=[]) for v in var_list]
        self._factors = [
            self.add_variable_from_reference(v, "factor", initial_value=tf.ones([], v.dtype)) for v in var_list
        ]

    def update_step(self, gradient: Any, variable: Any) -> None:
        """Updates momentum, variances, coefficient and weight."""
        momentum, velocity = self._slots_of(variable)
        fresh = self._fresh[self._index_dict[self._var_key(variable)]]
        value, dtype = tf.convert_to_tensor(gradient), variable.dtype
        rate = 1.0 - self.beta_1
        if self._is_exchanged(variable):
            # Later it is the momentum, which says the replicas' average gradient.
            given = value * self._by_phase(1.0, 1.0 / rate, dtype) - momentum * self._by_phase(
                0.0, self.beta_1 / rate, dtype
            )
            momentum.assign_add((value - momentum) * self._by_phase(rate, 1.0, dtype))
        else:
            given = value
            momentum.assign_add((value - momentum) * rate)
        velocity.assign_add((tf.square(given) - velocity) * self._by_phase(1.0 - self.beta_2, 0.0, dtype))
        fresh.assign_add((tf.square(given) - fresh) * (1.0 - self.beta_2))
        power_1, power_2 = self._powers(dtype)
        root = tf.sqrt(velocity / (1 - power_2)) + self.epsilon
        adaptive = tf.where(velocity > 0, momentum / (1 - power_1) / root, tf.zeros_like(momentum))
        update = adaptive
        if self.decay_of_update and self._use_weight_decay(variable):
            update = adaptive + self.decay_of_update * variable
        coefficient = self._coefficient(variable, root, fresh, adaptive, update)
        variable.assign_sub(tf.cast(self.learning_rate, dtype) * coefficient * update)

    def _coefficient(self, variable: Any, root: Any, fresh: Any, adaptive: Any, update: Any) -> tf.Tensor:
        """Returns the scalar that scales the update of a weight, and updates what is known of it."""
        place = self._index_dict[self._var_key(variable)]
        average, last, dtype = self._coefficients[place], self._factors[place], variable.dtype
        is_warming = self._is_warming()
        weight_norm, update_norm = tf.norm(tf.convert_to_tensor(variable)), tf.norm(update)
        ratio = tf.clip_by_value(
            tf.math.divide_no_nan(weight_norm, update_norm), self.min_coefficient, self.max_coefficient
        )
        now = tf.where(tf.logical_and(weight_norm > 0, update_norm > 0), ratio, tf.ones([], dtype))
        average.assign_add((now - average) * self._by_phase(1.0 - self.coefficient_beta, 0.0, dtype))
        steps = tf.minimum(self.iterations + 1, self.warmup_steps)
        frozen = average / (1 - tf.pow(tf.cast(self.coefficient_beta, dtype), tf.cast(steps, dtype)))
        step = tf.cast(self.iterations + 1, dtype)
        power = tf.pow(tf.cast(self.beta_2, dtype), step)
        factor = tf.reduce_max(root / (tf.sqrt(fresh / (1 - power)) + self.epsilon))
        # The decay of the weight does not depend on the variance.
        share = tf.minimum(tf.math.divide_no_nan(tf.norm(adaptive), update_norm), 1.0)
        factor = tf.clip_by_value(factor * share + (1 - share), self.min_factor, self.max_factor)
        before, threshold = tf.convert_to_tensor(last), self.factor_threshold
        factor = tf.clip_by_value(factor, before * (1 - threshold), before * (1 + threshold))
        last.assign(tf.where(is_warming, tf.ones([], dtype), factor))
        return tf.where(is_warming, now, frozen * tf.convert_to_tensor(last))
