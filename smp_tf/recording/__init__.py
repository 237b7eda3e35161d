"""Recordings of what ran when, and their files."""
