"""A program written into a TensorFlow graph."""
