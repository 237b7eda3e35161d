"""The plan: who runs what and why, as a value, a text and a file."""
