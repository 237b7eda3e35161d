"""Nadam's product of momenta, advanced once per step, whatever variables a rank has.

Keras notes in Python for which step it has multiplied the product, so that the first variable of a step does it and the
others take what is there:

    counter == step + 2 ?   yes: take the product     no: multiply it, counter += 1

Traced, that note is made once and for all: in a `tf.function` nearly every variable multiplies the product, every step
(seen in tf_keras 2.16 to 2.21). Then the updates depend on how many variables the optimizer has, here those of one
rank; and after a restore the note is that of a new process. So, while there are distributed models, an object that
knows which variable is the first one of a step stands in for the counter.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import tf_keras


class _OncePerStep:
    """Stands for the counter while gradients are applied: equal to what it is compared with from the first sum on."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self._advanced = False

    def __eq__(self, other: object) -> Any:
        return tf.constant(self._advanced)

    def __add__(self, other: int) -> _OncePerStep:
        self._advanced = True
        return self


def begin_step(optimizer: Any) -> None:
    """Notes that an optimizer is about to apply gradients, once.

    Args:
        optimizer: any Keras optimizer; only Nadam's new form keeps such a note.
    """
    if isinstance(optimizer, tf_keras.optimizers.Nadam):
        optimizer._u_product_counter = _OncePerStep()
