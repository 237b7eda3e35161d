"""Refuses scopes of `tf.distribute`, which itself copies a model over devices, and so excludes a split model."""

from __future__ import annotations

import tensorflow as tf

from smp_tf.errors import StepError


def refuse_strategy(doing: str) -> None:
    """Raises an error where a strategy of `tf.distribute` is in force.

    Args:
        doing: words for what was begun, such as "Model 'net' was compiled".

    Raises:
        StepError: a strategy is in force.
    """
    if not tf.distribute.has_strategy():
        return
    name = type(tf.distribute.get_strategy()).__name__
    raise StepError(
        f"{doing} in the scope of a strategy of tf.distribute, {name}. smp_tf splits and copies models itself, over "
        f"processes, and a strategy within one of them would make variables that no other rank knows. Take the "
        f"strategy out of the script (strategy.scope(), strategy.run, tf.distribute.experimental_set_strategy), and "
        f"start a process for each device: horovodrun -np 2 python train.py."
    )
