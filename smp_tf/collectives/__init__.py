"""Collectives through one interface, and Horovod, which does them."""
