"""On which steps of a training the batches of a replica's ranks are compared: the first ones, and then one of many."""

FIRST_STEPS, EVERY = 10, 100
