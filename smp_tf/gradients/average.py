"""Averages gradients that no step has averaged over the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smp_tf.collectives.interface import order
from smp_tf.gradients.agreement import require_alike
from smp_tf.job import runtime
from smp_tf.partition.spread import EVERYWHERE
from smp_tf.replicas.gradient_marks import comes_from_a_step, mark, mark_of
from smp_tf.replicas.sparse_sums import sum_of_slices
from smp_tf.replicas.sums import scaled, sum_gradients
from smp_tf.replicas.unaveraged import require_averaged
from smp_tf.sharding import layouts
from smp_tf.variables.host_offload import beside_gradients


def average_gradients(gradients: Sequence[Any]) -> list[Any]:
    """Averages gradients over the replicas of this rank's partition.

    A gradient from `accumulate` of a step's output is averaged already, and is returned as it is. This function is for
    gradients that were computed in another way, such as those of the script's own variables.

    Args:
        gradients: tensors or sparse slices, equal on every replica in number, shapes and types. The gradient of a
            weight that this rank does not store is None.

    Returns:
        The averages, in order; None stays None.

    Raises:
        NotInitializedError: `smp.init` was not called.
        StepError: with shard_optimizer_state, replicas were given different lists, such as averages of a step that were
            changed outside a function, or zeros in place of None. In a function it is a tf.errors.OpError.
        StepError: a gradient is of a step that leaves the average to an optimizer (`"gradient_compression": "1bit"`).
        tf.errors.OpError: the gradients of another replica have other shapes.

    Example:
        >>> scale = tf.Variable(2.0)
        >>> with tf.GradientTape() as tape:
        ...     penalty = scale**2
        >>> smp.average_gradients(tape.gradient(penalty, [scale]))
        [<tf.Tensor: shape=(), dtype=float32, numpy=4.0>]
    """
    results = list(gradients)
    require_averaged(results, "smp.average_gradients (which smp.DistributedOptimizer calls)")
    replicas = runtime.current().topology.replicas
    todo = [i for i, gradient in enumerate(results) if gradient is not None and not mark_of(gradient).is_average]
    # There is one name for all. A replica with batches of another size may trace a function once more than others, so a
    # count would give the same average other names.
    name, handles = "smp_average", [] if tf.executing_eagerly() else [order().handle]
    if layouts.are_received_apart() and results:
        # What was made from averages, such as a clipped one, is an average. Other replicas have those of other weights.
        todo = [i for i in todo if not comes_from_a_step(results[i])]
        results = require_alike(results, todo, f"{name}_alike", handles)
    if not todo:
        return results
    dense = [i for i in todo if not isinstance(results[i], tf.IndexedSlices)]
    tensors = [tf.convert_to_tensor(results[i]) for i in dense]
    sums = sum_gradients(tensors, name, handles=handles)
    with beside_gradients():
        for i, total in zip(dense, sums, strict=True):
            results[i] = scaled(total, 1.0 / replicas)
    for i in (i for i in todo if isinstance(results[i], tf.IndexedSlices)):
        results[i] = scaled(sum_of_slices(results[i], f"{name}_{i}", handles), 1.0 / replicas)
    for i in todo:
        mark(results[i], spread=EVERYWHERE)
    return results
