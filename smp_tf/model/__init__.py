"""`smp.DistributedModel`: wrapping, manual placement, saving, loading, profiling."""

# What `smp.DistributedModel(model)` makes is built upon DistributedModel, which must know of it whoever imports which.
from smp_tf.model import wrapped as wrapped
