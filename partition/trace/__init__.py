"""From a `tf.function` to the op graph."""
