"""`smp.DistributedModel`: wrapping, manual placement, saving, loading, profiling."""
