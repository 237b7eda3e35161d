"""Keras's `fit`, `evaluate` and `predict` over the ranks of a job: what runs around their batches."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from smp_tf.announce import announce
from smp_tf.batch.output import StepOutput
from smp_tf.job import runtime
from smp_tf.keras import adapter
from smp_tf.keras.strategy_scope import refuse_strategy
from smp_tf.training import keras_callbacks
from smp_tf.training.agreement import agree_on_fit
from smp_tf.training.batch_function import BatchFunction
from smp_tf.training.callbacks import BroadcastInitialState, MetricAverage
from smp_tf.training.shuffling import shuffled_alike
from smp_tf.variables.model_context import keras_loop


def run_loop(model: Any, loop: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs one of Keras's loops with the callbacks of this rank. Only rank 0 shows the progress.

    Args:
        model: the distributed model.
        loop: Keras's method `fit`, `evaluate` or `predict` of the model.
        args: the arguments that it was called with.
        kwargs: the same by keyword.

    Returns:
        What the loop returns.
    """
    refuse_strategy(f"{loop.__name__} of model {model.name!r} was called")
    if model.autotune_steps_per_execution:
        # Keras would follow each rank's clock. Nor can it make a loop over batches in one graph here.
        model.autotune_steps_per_execution = False
        announce('steps_per_execution="auto" is taken for 1.', runtime.current().topology.rank)
    bound = inspect.signature(loop).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments.get("callbacks")
    adapted = keras_callbacks.adapt(given, model)
    shuffled: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if loop.__name__ == "fit":
        together = agree_on_fit(bound.arguments, keras_callbacks.as_list(given))
        if runtime.current().topology.replicas > 1:
            adapted = keras_callbacks.before_all(adapted, [BroadcastInitialState(), MetricAverage()], model)
        if together is not None:
            adapted = keras_callbacks.after_all(adapted, together, model)
        shuffled = shuffled_alike(bound.arguments)
    bound.arguments["callbacks"] = adapted
    if runtime.current().topology.rank:
        bound.arguments["verbose"] = 0
    elif bound.arguments["verbose"] != 0 and isinstance(adapted, list):
        adapted += adapter.loops().progress_in_lines(adapted)
    with keras_loop(), shuffled:
        return loop(*bound.args, **bound.kwargs)


def train_function(model: Any) -> BatchFunction:
    """Returns the function that `model.fit` calls for every batch."""
    return BatchFunction(model, "train_step", model._train_counter, _logs)


def test_function(model: Any) -> BatchFunction:
    """Returns the function that `model.evaluate` calls for every batch."""
    return BatchFunction(model, "test_step", model._test_counter, _logs)


def predict_function(model: Any) -> BatchFunction:
    """Returns the function that `model.predict` calls for every batch."""
    return BatchFunction(model, "predict_step", model._predict_counter, _predictions)


def _logs(results: Any) -> Any:
    """Returns the logs of a batch: metrics as they are after it, and all else averaged over microbatches."""
    return tf.nest.map_structure(_log, results)


def _log(value: Any) -> Any:
    if not isinstance(value, StepOutput):
        return value
    return value.outputs[-1] if value.follows_state else value.reduce_mean()


def _predictions(results: Any) -> Any:
    """Returns the predictions for a batch, as if it had not been split."""
    return tf.nest.map_structure(lambda value: value.merge() if isinstance(value, StepOutput) else value, results)
