"""The plan as a value, a text and a file. It says who runs what, and why."""
