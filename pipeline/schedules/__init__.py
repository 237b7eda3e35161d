"""Orders of compute tasks, one for each schedule."""
