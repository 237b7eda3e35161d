"""Measured times and memory of a run, as values."""
