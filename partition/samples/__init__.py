"""Finds the tensors of a step that hold samples, and the parts of a step that can be computed for the whole batch."""
