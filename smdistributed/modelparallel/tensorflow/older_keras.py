"""What scripts of 2020 call on Keras optimizers and today's tf_keras no longer has, or no longer heeds.

called                                  today, without this        with it
optimizer.get_gradients(loss, params)   AttributeError             gradients, in a graph (such as a step)
Adam(lr=0.1)                            0.001, after a warning     learning_rate=0.1
Adam(0.1, decay=1e-3)                   ValueError                 learning_rate=InverseTimeDecay(0.1, 1, 1e-3)
optimizer.weights, .get_weights()       AttributeError             its variables, their values
optimizer._decayed_lr(tf.float32)       AttributeError             the rate that its schedule gives now

Only the new optimizers need it; those of `tf.keras.optimizers.legacy` have all of this.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import tf_keras

import tensorflow as tf
from smp_tf.keras import adapter
from smp_tf.keras.patch import Patch
from smp_tf.partition.tf_internals import leave_unconverted

# AutoGraph, which converts a script's step, has nothing to convert here.
leave_unconverted("smdistributed")


class OlderOptimizerPatch(Patch):
    """Gives the new Keras optimizers back what those of TensorFlow 2.3 to 2.6 had."""

    def _replace(self) -> None:
        base = tf_keras.optimizers.Optimizer
        self._add(base, "get_gradients", get_gradients)
        self._add(base, "get_weights", get_weights)
        self._add(base, "_decayed_lr", decayed_rate)
        self._add(base, "weights", property(lambda optimizer: list(optimizer.variables)))
        for optimizer in adapter.optimizers().classes_defining("__init__"):
            is_new = issubclass(optimizer, base)
            if is_new and "learning_rate" in inspect.signature(optimizer).parameters:
                self._wrap(optimizer, "__init__", _with_older_arguments)


#: In force from `smp.init` of this package until `smp.shutdown`.
older_optimizer_patch = OlderOptimizerPatch()


def get_gradients(self: Any, loss: Any, params: Any) -> list[Any]:
    """Gradients of a loss, as optimizers of Keras 2.3 to 2.6 gave them; within a graph, such as a step, only.

    Args:
        self: the optimizer; one that scales the loss does so here, too.
        loss: a tensor of the graph.
        params: the variables, in any structure.

    Returns:
        A list of tensors, one per variable.

    Raises:
        ValueError: a variable has no gradient.
    """
    wanted = tf.nest.flatten(params)
    scales = hasattr(self, "get_scaled_loss")
    with tf.name_scope(f"{self.name}/gradients"):
        gradients = tf.gradients(self.get_scaled_loss(loss) if scales else loss, wanted)
    for gradient, variable in zip(gradients, wanted, strict=True):
        if gradient is None:
            raise ValueError(
                f"get_gradients: the loss does not depend on variable {variable.name!r}, or depends on it through ops "
                f"that have no gradient (argmax, rounding). Leave the variable out of params, or use "
                f"tf.gradients, which gives None for it."
            )
    return list(self.get_unscaled_gradients(gradients)) if scales else list(gradients)


def get_weights(self: Any) -> list[Any]:
    """The values of the optimizer's variables, as numpy arrays."""
    return [variable.numpy() for variable in self.variables]


def decayed_rate(self: Any, var_dtype: Any) -> tf.Tensor:
    """The learning rate as its schedule, if it has one, gives it for the next step; many scripts print it so."""
    adapter.optimizers().follow_schedule(self)
    return tf.cast(tf.convert_to_tensor(self.learning_rate), var_dtype)


def _with_older_arguments(original: Callable[..., None]) -> Callable[..., None]:
    parameters = list(inspect.signature(original).parameters)
    position = parameters.index("learning_rate") - 1  # without self
    default = inspect.signature(original).parameters["learning_rate"].default

    def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if "lr" in kwargs:
            if len(args) > position or "learning_rate" in kwargs:
                raise TypeError(
                    f"{type(optimizer).__name__} was given learning_rate and lr, its older name. Keep learning_rate."
                )
            kwargs["learning_rate"] = kwargs.pop("lr")
        decay = kwargs.pop("decay", None)
        if decay:
            given = args[position] if len(args) > position else kwargs.pop("learning_rate", default)
            rate = tf_keras.optimizers.schedules.InverseTimeDecay(given, decay_steps=1, decay_rate=decay)
            if len(args) > position:
                args = (*args[:position], rate, *args[position + 1 :])
            else:
                kwargs["learning_rate"] = rate
        original(optimizer, *args, **kwargs)

    return __init__
