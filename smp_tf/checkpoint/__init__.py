"""Checkpoints: how they are written, committed, found and restored."""
