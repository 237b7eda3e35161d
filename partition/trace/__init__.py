"""Traces a `tf.function` into an op graph."""
