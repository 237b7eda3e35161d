"""The module in which Keras looks for `OneBitLAMB` when it loads a compiled model, since files of models name it."""

from smp_tf.optimizer.one_bit_lamb import OneBitLAMB

__all__ = ["OneBitLAMB"]
