"""A step's arguments cut into microbatches, and results put together again."""
