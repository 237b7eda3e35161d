"""What a run took: measured times and memory, as values."""
