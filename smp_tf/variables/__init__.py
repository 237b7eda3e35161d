"""Who stores a weight, when it gets its value, and how weights of other ranks are read."""
