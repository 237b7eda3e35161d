"""Keras's loops and callbacks for split models."""
