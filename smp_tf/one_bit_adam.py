"""The module in which Keras looks for `OneBitAdam` when it loads a compiled model, since files of models name it."""

from smp_tf.optimizer.one_bit_adam import OneBitAdam

__all__ = ["OneBitAdam"]
