"""Solvers: which stage runs which unit."""
