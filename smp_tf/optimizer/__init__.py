"""Keras's optimizers applied by parts, and the 1-bit optimizers."""
