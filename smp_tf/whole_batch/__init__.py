"""Gives what steps compute of a whole batch as one process does: losses, logs, metrics, uses of gradients."""
