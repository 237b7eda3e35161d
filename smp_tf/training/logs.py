"""Makes logs the same on all replicas, as one process that sees the batches of all of them would.

In a training, metrics are computed once for the batches of all replicas (`whole_batch/joined_tail.py`).

Others are computed on each replica: in an evaluation, and where batches cannot be joined. At its end, and at that of an
epoch, the states of these metrics (sums and counts) are added over the replicas. The results are computed from the
sums. This is exact for every metric whose state adds up. Keras demands the same of metrics under its own distribution
strategies. After a single batch, and for values that are no metric's, replicas are averaged by their samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from smp_tf.job import exchange, runtime
from smp_tf.partition.mesh import CommGroup
from smp_tf.replicas.sums import sum_over_replicas


def average(logs: Mapping[str, Any], samples: Any, name: str) -> dict[str, Any]:
    """Returns the logs of a batch averaged over the replicas, in the graph of its step.

    Args:
        logs: numbers and scalar tensors by name. Other values stay as they are.
        samples: this replica's samples in the batch.
        name: name of the operation, equal on all replicas.
    """
    if runtime.current().topology.replicas == 1:
        return dict(logs)
    scalars = sorted(key for key, value in logs.items() if _is_scalar(value))
    weight = tf.cast(samples, tf.float64)
    sums = sum_over_replicas([weight, *(tf.cast(logs[key], tf.float64) * weight for key in scalars)], name)
    total, *weighted = sums
    means = {key: tf.cast(value / total, _float_type(logs[key])) for key, value in zip(scalars, weighted, strict=True)}
    return {key: means.get(key, value) for key, value in logs.items()}


def average_now(logs: Mapping[str, Any], samples: int, name: str) -> dict[str, Any]:
    """Returns the same for numbers, outside any graph. Every replica calls it."""
    if runtime.current().topology.replicas == 1:
        return dict(logs)
    mine = {key: float(value) for key, value in logs.items() if _is_number(value)}
    everyone = exchange.allgather_json([samples, mine], CommGroup.RDP_GROUP, name=name)
    total = sum(count for count, _ in everyone)
    if not total:
        return dict(logs)
    keys = [key for key in mine if all(key in theirs for _, theirs in everyone)]
    means = {key: sum(count * theirs[key] for count, theirs in everyone) / total for key in keys}
    return {key: means.get(key, value) for key, value in logs.items()}


@contextlib.contextmanager
def summed_states(metrics: Sequence[Any], of_all: Container[int] = ()) -> Iterator[None]:
    """Lets metrics hold the sums of their states over all replicas within its context. Every replica enters it.

    Args:
        metrics: the metrics.
        of_all: identities of variables that hold what all replicas have seen.
    """
    if runtime.current().topology.replicas == 1:
        yield
        return
    variables = [
        variable
        for metric in metrics
        for variable in metric.variables
        if variable.aggregation is tf.VariableAggregation.SUM
        and id(variable) not in of_all
        and (variable.dtype.is_floating or variable.dtype.is_integer)
    ]
    # Replicas that are still in a training step would wait in Horovod for this one, and this one for them. This tells
    # them apart.
    exchange.barrier(CommGroup.RDP_GROUP, name="the metrics at the end of an epoch or evaluation")
    own = [variable.numpy() for variable in variables]
    sums = sum_over_replicas([tf.constant(value, v.dtype) for value, v in zip(own, variables, strict=True)], _STATES)
    for variable, value in zip(variables, sums, strict=True):
        variable.assign(value)
    try:
        yield
    finally:
        for variable, value in zip(variables, own, strict=True):
            variable.assign(value)


#: Replicas run the same evaluations in the same order, and each ends before the next begins.
_STATES = "smp_metrics"


def _is_scalar(value: Any) -> bool:
    return (isinstance(value, tf.Tensor) and value.shape.rank == 0 and not value.dtype.is_bool) or _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


def _float_type(value: Any) -> tf.DType:
    return value.dtype if isinstance(value, tf.Tensor) and value.dtype.is_floating else tf.float32
