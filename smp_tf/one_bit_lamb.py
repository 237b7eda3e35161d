"""Where Keras looks for `OneBitLAMB` when it loads a compiled model: files of models name this module."""

from smp_tf.optimizer.one_bit_lamb import OneBitLAMB

__all__ = ["OneBitLAMB"]
