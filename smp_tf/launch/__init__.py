"""Starts the ranks of a job on one host or several, shows what they print, and says how they ended."""
