"""Where Keras looks for `OneBitAdam` when it loads a compiled model: files of models name this module."""

from smp_tf.optimizer.one_bit_adam import OneBitAdam

__all__ = ["OneBitAdam"]
