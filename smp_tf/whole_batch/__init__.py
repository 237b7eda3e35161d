"""Computes once, of a whole batch, what Keras's loops do not need for backward: logs, and what metrics hold."""
