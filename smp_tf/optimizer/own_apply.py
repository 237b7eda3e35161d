"""Tells whether an optimizer's own code has to run in the trace of the step that calls it.

In Keras's loops `apply_gradients` is recorded, and called after the microbatches. Each rank then gives it the gradients
of the weights that it updates. Code of the script's that makes something of several gradients, such as their norm,
would see those of one stage. Traced with the step, it is part of what the step makes of its gradients. That is
computed once per batch, of the gradients of all stages (`whole_batch/batch_results.py`):

    class Scaling(SGD):
        def apply_gradients(self, grads_and_vars):            traced with the step
            norm = tf.sqrt(tf.add_n([...]))
            return super().apply_gradients(...)               recorded, and called once per batch
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from smp_tf.gradients import joined_gradients
from smp_tf.optimizer.recorded_apply import ApplyRecorder

#: Ops that change nothing and need no weight.
_WITHOUT_EFFECT = frozenset({"Const", "Identity", "NoOp", "Placeholder"})


def joins_gradients(pairs: Sequence[tuple[Any, Any]], apply: Callable[[Sequence[tuple[Any, Any]]], Any]) -> bool:
    """Returns whether an optimizer's own code makes something of several gradients, and hands the results on to Keras.

    It is tried out in a graph that never runs. Code that makes variables, hands nothing on, or goes on after Keras's
    own method has changed the weights, has to run where these are changed.

    Args:
        pairs: gradients, or None, and variables.
        apply: takes such pairs, and runs the code.
    """
    if not all(gradient is None or isinstance(gradient, tf.Tensor) for gradient, _ in pairs):
        return False
    recorder = ApplyRecorder("An optimizer that is tried out")
    trial = tf.__internal__.FuncGraph("smp_trial")
    with trial.as_default(), tf.variable_creator_scope(_refused):
        gradients = [None if g is None else tf.compat.v1.placeholder(g.dtype, g.shape) for g, _ in pairs]
        given = list(zip(gradients, (variable for _, variable in pairs), strict=True))
        try:
            with recorder.recording(), joined_gradients.noting() as made:
                apply(given)
        except Exception:
            # It is run, and tells of its error, after the microbatches.
            return False
    if len(recorder.applies) != 1:
        return False
    after = trial.get_operations()[recorder.applies[0].position :]
    if any(operation.type not in _WITHOUT_EFFECT for operation in after):
        return False
    return joined_gradients.first_joined(gradients, made) is not None


def _refused(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
    raise RuntimeError("No variable is made while an optimizer is tried out.")
