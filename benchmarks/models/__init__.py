"""The models that benchmarks train, and their sizes."""
