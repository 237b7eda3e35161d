"""Decides who stores a weight and when it gets its value, and reads weights of other ranks."""
