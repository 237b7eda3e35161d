"""The pipeline: which rank runs which task when, and how it is run."""
