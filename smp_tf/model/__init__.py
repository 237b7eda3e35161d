"""`smp.DistributedModel`: wrapping, manual placement, saving, loading, profiling."""

# The class of `smp.DistributedModel(model)` is built upon DistributedModel. That must know it, whichever is imported
# first.
from smp_tf.model import wrapped as wrapped
