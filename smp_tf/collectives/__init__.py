"""Collectives through one interface, and their implementation with Horovod."""
