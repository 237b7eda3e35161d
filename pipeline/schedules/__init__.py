"""Orders of compute tasks, one per schedule."""
