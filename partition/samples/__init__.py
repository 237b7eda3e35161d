"""Which tensors of a step hold samples, and what of a step is computed of the whole batch."""
