"""Compiled models of tf_keras: their losses and metrics.

Private pieces work with tf_keras 2.21. tests/smp_tf/keras/test_losses.py fails when they change.
"""

from __future__ import annotations

from typing import Any

from tf_keras.losses import Reduction
from tf_keras.src.engine import compile_utils
from tf_keras.src.metrics import base_metric
from tf_keras.src.utils import losses_utils, metrics_utils

#: What `tf_keras.Model.compile` sets of a model, but for the functions of its loops. Seen in tf_keras 2.16 to 2.21.
_SET_BY_COMPILE = (
    "_compile_config",
    "_compiled_trainable_state",
    "_is_compiled",
    "_jit_compile",
    "_pss_evaluation_shards",
    "_run_eagerly",
    "_steps_per_execution",
    "compiled_loss",
    "compiled_metrics",
    "loss",
    "optimizer",
)


def is_compiled(model: Any) -> bool:
    """Returns whether `compile` was called on a model."""
    return bool(model._is_compiled)


def set_by_compile() -> tuple[str, ...]:
    """Returns the attributes that `compile` sets of a model."""
    return _SET_BY_COMPILE


def is_mean(reduction: Any) -> bool:
    """Returns whether a loss is a mean over samples."""
    return reduction in (Reduction.AUTO, Reduction.SUM_OVER_BATCH_SIZE)


def is_sum(reduction: Any) -> bool:
    """Returns whether a loss is a sum over samples."""
    return bool(reduction == Reduction.SUM)


def no_reduction() -> Any:
    """Returns the reduction of a loss that its caller reduces."""
    return Reduction.NONE


def compiled_losses() -> tuple[type, Any]:
    """Returns the class of a compiled model's losses, and the module of the functions that reduce losses.

    Losses call `apply_valid_mask(losses, weights, mask, reduction)` and `compute_weighted_loss(losses, weights,
    reduction)` of that module. Seen in tf_keras 2.16 to 2.21.
    """
    return compile_utils.LossesContainer, losses_utils


def reducing_metric() -> tuple[type, frozenset[str]]:
    """Returns the class of metrics that add up numbers, and its reductions that divide by how many there were.

    Its `update_state(values, sample_weight)` counts a scalar once where there is no weight, and as often as the weight
    says where there is one. Seen in tf_keras 2.16 to 2.21.
    """
    averages = {metrics_utils.Reduction.WEIGHTED_MEAN, metrics_utils.Reduction.SUM_OVER_BATCH_SIZE}
    return base_metric.Reduce, frozenset(averages)
