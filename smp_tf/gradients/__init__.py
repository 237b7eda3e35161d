"""Norms and averages of gradients, over stages and replicas."""
