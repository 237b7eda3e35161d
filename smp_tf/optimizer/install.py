"""Replaces methods of Keras and TensorFlow while there are distributed models."""

from __future__ import annotations

from typing import Any

from smp_tf.gradients.norms import NormPatch
from smp_tf.job import runtime
from smp_tf.job.at_shutdown import on_shutdown
from smp_tf.keras.layer_patches import StatePatch
from smp_tf.optimizer.patch import optimizer_patch
from smp_tf.replicas.synchronized_moments import moments_patch
from smp_tf.variables import guarded, store
from smp_tf.variables.model_context import step_being_traced
from smp_tf.variables.weight_reads import read_patch


def _fill(variable: Any) -> None:
    owner = store.store_of(variable)
    if owner is not None:
        owner.fill(variable, runtime.current().seed)


#: In force from the first distributed model until `smp.shutdown`.
norm_patch = NormPatch(lambda: step_being_traced() is not None)
state_patch = StatePatch(guarded.made_at_once, _fill)


def patch_keras() -> None:
    """Makes Keras and TensorFlow see all ranks, until `smp.shutdown`. A second call changes nothing."""
    for patch in (optimizer_patch, state_patch, norm_patch, moments_patch, read_patch):
        if patch.install():
            on_shutdown(patch.remove)
