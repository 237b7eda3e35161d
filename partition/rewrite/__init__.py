"""What is changed in the op graph of a step before it is cut."""
