"""Compares a training with the one that a single process would do with the whole batch."""
