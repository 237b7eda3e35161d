"""The pipeline: which rank runs which task when, and what runs it."""
