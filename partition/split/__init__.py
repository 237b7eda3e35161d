"""The cut: which ops each stage runs, and what passes between stages."""
