"""Sums over replicas (dense, sparse, compressed), and what must be equal on all replicas."""
