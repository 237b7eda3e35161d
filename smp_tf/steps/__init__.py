"""`@smp.step`: traced, planned, built, called."""
