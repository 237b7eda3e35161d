"""Writes a program into a TensorFlow graph."""
