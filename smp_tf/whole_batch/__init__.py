"""Computes once for a whole batch what Keras's loops do not need for backward: logs, and the states of metrics."""
