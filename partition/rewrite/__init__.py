"""Changes to the op graph of a step before it is cut."""
