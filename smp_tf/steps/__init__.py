"""`@smp.step`: how a step is traced, planned, built and called."""
