"""The point-to-point transport between ranks, and the TensorFlow ops over it."""
