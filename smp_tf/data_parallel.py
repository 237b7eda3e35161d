"""Average gradients over replicas: a sum over the ranks that hold the same stage, once per step and dtype."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from smp_tf import runtime
from smp_tf.topology import CommGroup

#: Horovod reduces no bfloat16; such sums travel as float32.
_WIRE_TYPE = {tf.bfloat16: tf.float32}


def sum_over_replicas(tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
    """The sums over the replicas of tensors that every rank of this stage's group has.

    Args:
        tensors: dense tensors, the same number, shapes and types on every rank of the group.
        name: unique name of the operation, equal on those ranks.

    Returns:
        The sums; the tensors themselves where there is one replica.
    """
    running = runtime.current()
    if not tensors or running.topology.group_size(CommGroup.DP_GROUP) == 1:
        return list(tensors)
    import horovod.tensorflow as hvd

    sent = [tf.cast(t, _WIRE_TYPE.get(t.dtype, t.dtype)) for t in tensors]
    sums: dict[int, tf.Tensor] = {}
    # Horovod's op takes tensors of one dtype.
    for dtype in sorted({t.dtype for t in sent}, key=lambda dtype: dtype.name):
        of_type = [index for index, t in enumerate(sent) if t.dtype == dtype]
        reduced = hvd.grouped_allreduce(
            [sent[index] for index in of_type],
            op=hvd.Sum,
            name=f"{name}_{dtype.name}",
            process_set=running.process_sets.dp,
        )
        sums.update(zip(of_type, reduced, strict=True))
    return [tf.cast(sums[index], t.dtype) for index, t in enumerate(tensors)]
