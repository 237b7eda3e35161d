"""Cuts a step's arguments into microbatches, and puts results together again."""
