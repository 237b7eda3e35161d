"""Advances Nadam's product of momenta once per step, whatever variables a rank has.

Keras notes in Python for which step it has multiplied the product. So the first variable of a step multiplies it, and
the others take it:

    counter == step + 2 ?   yes: take the product     no: multiply it, counter += 1

When this is traced, the note is made only once. So in a `tf.function` nearly every variable multiplies the product in
every step (in tf_keras 2.16 to 2.21). Then the updates depend on how many variables the optimizer has, which here are
those of one rank. After a restore, the note is that of a new process. So, while there are distributed models, another
object replaces the counter. It knows which variable is the first one of a step.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import tf_keras


class _OncePerStep:
    """Stands for the counter while gradients are applied. From the first sum on, it equals what it is compared with."""

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
        optimizer: any Keras optimizer. Only the new Nadam keeps such a note.
    """
    if isinstance(optimizer, tf_keras.optimizers.Nadam):
        optimizer._u_product_counter = _OncePerStep()
