"""Checkpoints: written, committed, found again, restored."""
