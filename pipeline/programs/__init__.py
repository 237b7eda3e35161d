"""Lists of tasks: made, checked, simulated and drawn, without TensorFlow."""
