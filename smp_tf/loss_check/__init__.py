"""Holds a training against the one that a single process would do with the whole batch."""
