"""The op graph: every op of a step, what it is connected to, and what it does, as plain values."""
