"""Horovod's collectives and process sets."""
