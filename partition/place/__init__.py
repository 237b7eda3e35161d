"""Solvers that decide which stage runs which unit."""
