"""The classes of tf_keras that ours are built upon, since a class names its base when it is defined."""

from __future__ import annotations

from typing import Any

import tf_keras
from tf_keras import Model
from tf_keras.callbacks import Callback
from tf_keras.optimizers import Optimizer

__all__ = ["Callback", "Model", "Optimizer", "not_an_override", "registered"]

#: Decorates a class of the package smp_tf that Keras must find again when it reads what it has written.
registered = tf_keras.utils.register_keras_serializable(package="smp_tf")


def not_an_override(method: Any) -> Any:
    """Marks a model's method as one of Keras's own, so that Keras does not act as if the user had written it.

    Keras calls an overridden `build` before the first call of the model. That call would then have to run on
    placeholders, too.
    """
    method._is_default = True
    return method
