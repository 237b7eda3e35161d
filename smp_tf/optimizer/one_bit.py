"""What the optimizers that send one bit per element share: a warm-up, a frozen variance, and the exchange.

    warm-up     gradients of this replica ── averaged, whole ─────▶ momentum, variance ─▶ weights
    afterwards  momentum of this replica ─── averaged, one bit ───▶ momentum            ─▶ weights
                                                                    variance as it was

Without `"gradient_compression": "1bit"`, and with one replica, gradients are averaged already and nothing is sent. The
variance is frozen all the same.

The momentum is linear in the gradients, so what one message lost can be added to the next. The variance is not linear,
but after a while it changes little and need not be sent.

Source: Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", ICML
2021, section 4 and Algorithm 1.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from smp_tf.collectives.interface import order
from smp_tf.errors import StepError
from smp_tf.job import runtime
from smp_tf.job.agreement import require_agreement
from smp_tf.job.exchange import allgather_json
from smp_tf.keras.bases import Optimizer
from smp_tf.partition.mesh import CommGroup
from smp_tf.partition.spread import Partial
from smp_tf.replicas import sums, unaveraged
from smp_tf.replicas.one_bit_errors import ErrorFeedback, Group, errors_per_weight
from smp_tf.sharding.layouts import layout_of

#: Arguments of Keras's optimizers that change gradients before they are applied.
_CLIPS = ("clipnorm", "clipvalue", "global_clipnorm")


class OneBitOptimizer(Optimizer):
    """An optimizer with momentum and variance that itself averages over the replicas where steps leave this to it.

    Args:
        learning_rate: a number or a schedule.
        beta_1: decay of the momentum.
        beta_2: decay of the variance, while that changes.
        epsilon: added to the root of the variance.
        warmup_steps: steps after which the variance stays as it is.
        weight_decay: Keras's weight decay, decoupled from the gradients; None for none.
        name: name of the optimizer.
        others: further arguments, which are all refused.

    Raises:
        ValueError: an argument is out of its range, or unknown.
    """

    #: Says this to code that must not know this class.
    averages_itself = True

    def __init__(
        self,
        learning_rate: Any,
        beta_1: float,
        beta_2: float,
        epsilon: float,
        warmup_steps: int,
        weight_decay: float | None,
        name: str,
        others: Mapping[str, Any],
    ) -> None:
        kind = type(self).__name__
        for beta, value in (("beta_1", beta_1), ("beta_2", beta_2)):
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{beta} of {kind} must be at least 0 and below 1. Received: {beta}={value!r}")
        if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 1:
            raise ValueError(
                f"warmup_steps of {kind} must be an int of at least 1: the variance of the gradients comes of these "
                f"steps. Received: warmup_steps={warmup_steps!r}"
            )
        if any(others.get(clip) is not None for clip in _CLIPS):
            raise ValueError(
                f"{kind} takes no {', '.join(_CLIPS)}: each replica would clip what it has by itself, and momenta are "
                f"no gradients. Clip the gradients before they are applied, as smp.clip_by_global_norm does. "
                f"Received: {dict(others)!r}"
            )
        if unknown := [key for key, value in others.items() if key not in _CLIPS]:
            raise ValueError(f"{kind} has no argument {unknown[0]!r}. Received: {dict(others)!r}")
        super().__init__(name=name, weight_decay=weight_decay, jit_compile=False)
        self._learning_rate = self._build_learning_rate(learning_rate)
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.warmup_steps = warmup_steps
        #: What was not sent yet. The variables belong to no model, as `ErrorFeedback` says.
        self.error_feedback = ErrorFeedback()
        # The start of smp_tf in which replicas were last found at the same step.
        self._compared_in = -1
        # Keys of the weights for which there are averages, until these are applied.
        self._averaged: set[Any] = set()

    def build(self, var_list: Sequence[Any]) -> None:
        """Makes the slots of weights, once."""
        super().build(var_list)
        if getattr(self, "_built", False):
            return
        self._built = True
        self._momentums = [self.add_variable_from_reference(v, "m") for v in var_list]
        self._velocities = [self.add_variable_from_reference(v, "v") for v in var_list]
        self._build_more(var_list)

    def _build_more(self, var_list: Sequence[Any]) -> None:
        """Makes further slots, if there are any."""

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make the same optimizer again."""
        return {
            "name": self.name,
            "learning_rate": self._serialize_hyperparameter(self._learning_rate),
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
            "warmup_steps": self.warmup_steps,
            "weight_decay": self.weight_decay,
        }

    def slots_beside(self) -> float:
        """Returns what this rank keeps for a weight besides its slots, in sizes of the weight."""
        return errors_per_weight(runtime.current().topology.replicas) if unaveraged.are_left() else 0.0

    def aggregate_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Averages this replica's gradients, or after the warm-up its momenta, over the replicas."""
        pairs = list(grads_and_vars)
        self._averaged.clear()
        if not unaveraged.are_left():
            return list(super().aggregate_gradients(pairs))
        here = [position for position, (gradient, _) in enumerate(pairs) if gradient is not None]
        if not here:
            return pairs
        gradients, weights = zip(*(pairs[position] for position in here), strict=True)
        groups = self.error_feedback.groups_of(weights)
        with tf.init_scope():
            self.build([variable for _, variable in pairs])
            self._require_equal_steps()
        averages = tf.cond(
            self._is_warming(),
            lambda: self._averaged_gradients(gradients, weights, groups),
            lambda: self._averaged_momenta(gradients, weights, groups),
        )
        for position, average in zip(here, averages, strict=True):
            pairs[position] = average, pairs[position][1]
        self._averaged.update(map(self._var_key, weights))
        return pairs

    @abc.abstractmethod
    def update_step(self, gradient: Any, variable: Any) -> None:
        """Applies the result of `aggregate_gradients` for a weight."""

    def _averaged_gradients(
        self, gradients: Sequence[Any], weights: Sequence[Any], groups: Sequence[Group]
    ) -> list[tf.Tensor]:
        replicas = runtime.current().topology.replicas
        averages: dict[int, tf.Tensor] = {}
        for group in groups:
            tensors = [_dense(gradients[member], weights[member]) for member in group.members]
            totals = sums.sum_gradients(tensors, f"smp_one_bit_gradients_{group.number}", handles=_handles())
            averages.update(zip(group.members, (total * (1.0 / replicas) for total in totals), strict=True))
        return [averages[position] for position in range(len(gradients))]

    def _averaged_momenta(
        self, gradients: Sequence[Any], weights: Sequence[Any], groups: Sequence[Group]
    ) -> list[tf.Tensor]:
        averages: dict[int, tf.Tensor] = {}
        ends: list[list[tf.Tensor]] = []
        for group in groups:
            # Two at a time, since each takes memory.
            with tf.control_dependencies(ends[-2] if len(ends) > 1 else []):
                slots = [self._slots_of(weights[member]) for member in group.members]
                own = [
                    momentum + (_dense(gradients[member], weights[member]) - momentum) * (1.0 - self.beta_1)
                    for member, (momentum, _) in zip(group.members, slots, strict=True)
                ]
                found = group.average(own, f"smp_one_bit_{group.number}", _handles())
            ends.append(found)
            for member, (momentum, velocity), average in zip(group.members, slots, found, strict=True):
                # A sign cannot stand for zero.
                averages[member] = tf.where(velocity > 0, tf.cast(average, momentum.dtype), tf.zeros_like(momentum))
        return [averages[position] for position in range(len(gradients))]

    def _require_equal_steps(self) -> None:
        """Raises an error where replicas are at different steps, since one would send gradients and another momenta.

        It compares only at the first use since `smp.init`, since from then on all count alike.

        Raises:
            RankMismatchError: the replicas are at different steps.
        """
        if self._compared_in == runtime.starts():
            return
        topology = runtime.current().topology
        own = {"iterations": int(self.iterations.numpy()), "warmup_steps": self.warmup_steps}
        said = allgather_json(own, CommGroup.RDP_GROUP, name=f"the first use of {type(self).__name__}")
        require_agreement(
            f"the steps of {type(self).__name__}",
            dict(zip(topology.members(CommGroup.RDP_GROUP), said, strict=True)),
            topology.describe,
            "Restore the same checkpoint on all replicas, and give the optimizer the same arguments.",
        )
        self._compared_in = runtime.starts()

    def _slots_of(self, variable: Any) -> tuple[Any, Any]:
        """Returns the momentum and variance of a weight."""
        place = self._index_dict[self._var_key(variable)]
        return self._momentums[place], self._velocities[place]

    def _is_warming(self) -> tf.Tensor:
        return self.iterations < self.warmup_steps

    def _is_exchanged(self, variable: Any) -> bool:
        """Returns whether `aggregate_gradients` has made what is now applied to a weight, and will make its momentum.

        Raises:
            StepError: it should have, and has not.
        """
        if not isinstance(layout_of(variable).gradient, Partial):
            return False
        key = self._var_key(variable)
        if key not in self._averaged:
            raise StepError(
                f'With "gradient_compression": "1bit" {type(self).__name__} averages over the replicas while it '
                f"applies gradients. apply_gradients was told not to (skip_gradients_aggregation, or "
                f"experimental_aggregate_gradients=False). Leave that out."
            )
        self._averaged.discard(key)
        return True

    def _by_phase(self, warming: float, later: float, dtype: tf.DType) -> tf.Tensor:
        """Returns one number during the warm-up, and another one afterwards."""
        return tf.where(self._is_warming(), tf.constant(warming, dtype), tf.constant(later, dtype))

    def _powers(self, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the shares that the initial zeros still have in momentum and variance, the latter when it froze."""
        step = self.iterations + 1
        frozen = tf.minimum(step, self.warmup_steps)
        return (
            tf.pow(tf.cast(self.beta_1, dtype), tf.cast(step, dtype)),
            tf.pow(tf.cast(self.beta_2, dtype), tf.cast(frozen, dtype)),
        )


def _dense(gradient: Any, weight: Any) -> tf.Tensor:
    """Returns a gradient as a tensor of known shape, which slices do not have."""
    return tf.ensure_shape(tf.convert_to_tensor(gradient), weight.shape)


def _handles() -> list[Any]:
    """Returns the handles that order averages, since all steps and optimizers use the same name."""
    return [] if tf.executing_eagerly() else [order().handle]
