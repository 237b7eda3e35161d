"""Makes, checks, simulates and draws lists of tasks, without TensorFlow."""
