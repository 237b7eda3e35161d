"""`model.profile`: time every unit of a model on example inputs, for the plan that its first step makes."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from rich.console import Console
from rich.progress import Progress

from smp_tf import planning, runtime
from smp_tf.announce import announce
from smp_tf.control import broadcast_json
from smp_tf.errors import PlacementError, StepError
from smp_tf.model import DistributedModel, keras_model_of
from smp_tf.partition.op_graph import OpGraph
from smp_tf.pipeline import profile as measuring
from smp_tf.step import step
from smp_tf.step_trace import StepTrace

_MEASURER = 0


def profile(model: DistributedModel, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Measure a model; see `DistributedModel.profile`.

    Args:
        model: a distributed model that has run no step.
        inputs: example inputs.
        kwargs: more of them, by keyword.

    Raises:
        StepError: the model has run a step already, or gives nothing that has a gradient.
    """
    running = runtime.current()
    if not tf.executing_eagerly():
        raise StepError(f"Model {model.name!r} cannot be profiled inside a tf.function. Call profile before it.")
    if any(model._smp_store.is_placed(variable) for variable in model._smp_store):
        raise StepError(
            f"Model {model.name!r} has run a step already, by whose plan it stays. Call profile before the first step."
        )
    if running.topology.mp_size == 1:
        announce("There is one partition, so nothing to plan: profile measures nothing.", running.topology.rank)
        return
    if "training" not in kwargs and takes_training(model):
        kwargs = {**kwargs, "training": True}
    # All ranks trace, since the model makes its variables meanwhile, and in the same order on all.
    traced = forward_backward(model).trace(*inputs, **kwargs)
    measured: dict[str, tuple[float, float]] = {}
    if running.topology.rank == _MEASURER:
        tensors = tf.nest.flatten((inputs, kwargs), expand_composites=True)
        measured = _measure(model, traced, [tf.convert_to_tensor(t) for t in tensors if _is_tensor(t)])
    told = broadcast_json(measured, _MEASURER, name=f"profiling model {model.name!r}")
    model._smp_store.measured = {name: (forward, backward) for name, (forward, backward) in told.items()}


def _is_tensor(value: Any) -> bool:
    return tf.is_tensor(value) or hasattr(value, "__array__")


def takes_training(model: DistributedModel) -> bool:
    """Whether the model's `call` has an argument `training`."""
    parameters = inspect.signature(keras_model_of(model).call).parameters
    return "training" in parameters


def forward_backward(model: DistributedModel, loss: Callable[[Any], tf.Tensor] | None = None) -> Any:
    """A step that takes a model's inputs, and the gradients of a loss of its outputs.

    Args:
        model: the model.
        loss: of what the model gives; None for one that every output takes part in.
    """

    def of_all(outputs: Any) -> tf.Tensor:
        tensors = [tf.convert_to_tensor(t) for t in tf.nest.flatten(outputs)]
        # Of squares: the gradient of a plain sum needs no forward pass, which is so of no loss.
        sums = [tf.reduce_sum(tf.square(tf.cast(t, tf.float32))) for t in tensors if t.dtype.is_floating]
        if not sums:
            raise StepError(f"Model {model.name!r} gives no floating-point numbers, so it has no backward pass.")
        return tf.add_n(sums)

    @step
    def forward_and_backward(*inputs: Any, **kwargs: Any) -> Any:
        with tf.GradientTape() as tape:
            found = (loss or of_all)(model(*inputs, **kwargs))
        return tape.gradient(found, model.trainable_variables), found

    return forward_and_backward


def _measure(model: DistributedModel, traced: StepTrace, tensors: list[tf.Tensor]) -> dict[str, tuple[float, float]]:
    graph = traced.graph
    try:
        units, cut = planning.cut_into_units(graph)
    except PlacementError as error:
        announce(f"Model {model.name!r} could not be profiled; the plan goes by estimates. {error}", _MEASURER)
        return {}
    own = {n: v for n, v in enumerate(traced.lowered.variables) if not graph.variables[n].in_model}
    with _progress(f"profiling the {len(units)} units of model {model.name!r}") as progress:
        seconds = measuring.profile(cut, tensors, traced.lowered.captures, own, progress)
    samples = _samples(graph, tensors)
    found = {}
    for unit in units:
        forward = seconds.get((unit.index, 0), 0.0)
        backward = sum(taken for (stage, sweep), taken in seconds.items() if stage == unit.index and sweep)
        found[unit.name] = (forward / samples, backward / samples)
    return found


def _samples(graph: OpGraph, tensors: list[tf.Tensor]) -> int:
    """Samples in the example inputs: the length of the first one that has any."""
    return next((int(tensor.shape[0]) for tensor in tensors if tensor.shape.rank), 1) or 1


@contextlib.contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    console = Console(stderr=True)
    if not console.is_terminal:
        announce(f"{what} ...", _MEASURER)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what)
        yield lambda done, of: bar.update(task, completed=done, total=of)
