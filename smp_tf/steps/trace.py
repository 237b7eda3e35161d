"""Traces a step function for one microbatch into an op graph, in the scopes in which models may be called."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from smp_tf.announce import announce
from smp_tf.batch.microbatches import SplitArgument
from smp_tf.errors import StepError
from smp_tf.job import runtime
from smp_tf.keras import adapter
from smp_tf.optimizer.install import patch_keras
from smp_tf.partition.graph.op_graph import OpGraph, Tensor
from smp_tf.partition.rewrite.passes import RANDOM, Rewritten, rewrite
from smp_tf.partition.rewrite.state_reads import as_values, read_before
from smp_tf.partition.trace.lower import Lowered, OutputSlot, lower
from smp_tf.partition.trace.trace import Recorder, Trace, trace
from smp_tf.variables import guarded
from smp_tf.variables.fed_types import Types, types_of
from smp_tf.variables.model_context import set_step_being_traced
from smp_tf.variables.models import SplitModel, is_distributed, model_with, take_variables
from smp_tf.variables.store import make_script_variable, store_of


class _OpenTrace:
    """A trace that is under way: which models are being called, and where new variables go."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.models: list[SplitModel] = []
        self.calls: list[tuple[SplitModel, Types]] = []
        self.axes: list[tuple[Any, int | None]] = []
        self._open: list[SplitModel] = []

    @contextlib.contextmanager
    def model_call(self, model: SplitModel) -> Iterator[None]:
        """Notes that a distributed model is being called."""
        if not self._open and self.recorder.in_nested_graph:
            raise StepError(
                f"Model {model.name!r} was called inside a tf.cond, a loop or a compiled function of the step, which "
                f"runs as one op and cannot be cut. Call the model outside it, and choose among its results with "
                f"tf.where or tf.cond."
            )
        if model not in self.models:
            self.models.append(model)
        self._open.append(model)
        try:
            yield
        finally:
            self._open.pop()

    @contextlib.contextmanager
    def layer_call(self, layer: Any) -> Iterator[None]:
        """Notes that a layer is called by no other layer. If it is part of a distributed model, that model is called.

        This happens where the step calls a method of the model, such as `model.encode(x)`, or `model.encoder(x)`.
        """
        model = model_with(layer)
        if model is None:
            yield
            return
        with self.model_call(model), self.recorder.call(model.name, type(model).__name__):
            yield

    def note_call(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes what a distributed model, or the model that it wraps, is called with."""
        for model in self.models:
            if layer is model._smp_keras_model:
                self.calls.append((model, types_of(args, kwargs, self._axis_of)))

    def _axis_of(self, tensor: Any) -> int | None:
        return next((axis for argument, axis in self.axes if argument is tensor), None)

    def creator(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        """Makes a variable: without storage inside a model's call, at once elsewhere."""
        if self._open:
            return self._open[-1]._smp_store.creator(next_creator, **kwargs)
        return make_script_variable(**kwargs)


@dataclass(frozen=True)
class StepTrace:
    """A step function, traced for one microbatch.

    Args:
        trace: the trace itself.
        lowered: the op graph read off it, as traced, with what it captures and returns.
        models: the distributed models that it calls.
        calls: the types that it calls them with.
    """

    trace: Trace
    lowered: Lowered
    models: list[SplitModel]
    calls: Sequence[tuple[SplitModel, Types]] = ()

    @functools.cached_property
    def _rewritten(self) -> Rewritten:
        return rewrite(self.lowered.graph, lambda note: announce(note, runtime.current().topology.rank))

    @property
    def graph(self) -> OpGraph:
        """Returns the op graph after all passes."""
        return self._rewritten.graph

    def tensor_of(self, tensor: tf.Tensor) -> Tensor:
        """Returns the tensor of the op graph that stands for one of the trace's."""
        return Tensor(self.lowered.graph.number_of[tensor.op.name], tensor.value_index)

    @property
    def is_random(self) -> bool:
        """Returns whether random ops were made stateless."""
        return RANDOM in self._rewritten.changed_by


@dataclass(frozen=True)
class Retrace:
    """A way to trace a step once more.

    Args:
        trace: takes another function with its parameters, and the number of samples to trace it for (None leaves it
            open), and returns the trace.
        microbatches: number of microbatches that a batch is cut into.
        has_any_size: whether the program that is being made takes batches of any size.
        samples: number of samples in its batches; None where it takes batches of any size.
        arguments: how the step's arguments are cut.
        form: what calls have in common whose arguments differ in nothing but the number of samples.
    """

    trace: Callable[[Callable[..., Any], int | None], StepTrace]
    microbatches: int
    has_any_size: bool
    samples: int | None = None
    arguments: Sequence[SplitArgument] = ()
    form: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Examined:
    """A step after it was looked at.

    Args:
        traced: its trace, perhaps changed.
        local: the names of the results that stay on the rank that makes them.
        stage_sums: how often the stages put numbers together for what is computed after the microbatches.
        joins: whether samples of all replicas are brought together after it.
    """

    traced: StepTrace
    local: tuple[str, ...] = ()
    stage_sums: int = 0
    joins: bool = False


@dataclass(frozen=True)
class Handed:
    """Tensors that a step is to hand out besides what it returns, each on the stage that makes it.

    Args:
        name: under which the step then returns them, in a list.
        tensors: tensors of the op graph as it was traced.
    """

    name: str
    tensors: tuple[Tensor, ...]


def with_outputs(traced: StepTrace, handed: Handed) -> StepTrace:
    """Returns the trace of a step that returns some of its tensors besides what it returns, which is a dictionary.

    Args:
        traced: the trace.
        handed: the tensors.
    """
    lowered = traced.lowered
    first = len(lowered.graph.outputs)
    slots = [OutputSlot((first + number,)) for number in range(len(handed.tensors))]
    more = dataclasses.replace(
        lowered,
        graph=dataclasses.replace(lowered.graph, outputs=lowered.graph.outputs + handed.tensors),
        results={**lowered.results, handed.name: slots},
    )
    return StepTrace(traced.trace, more, traced.models)


def trace_step(
    function: Callable[..., Any],
    specs: Sequence[tf.TypeSpec],
    call: Callable[[Callable[..., Any], Sequence[Any]], Any],
    *,
    autograph: bool,
    name: str,
    axes: Sequence[int | None] = (),
) -> StepTrace:
    """Traces a step function for one microbatch.

    Args:
        function: the function.
        specs: types of its tensor arguments, for one microbatch.
        call: calls the function, which AutoGraph may have converted, with its real signature, given the tensors.
        autograph: convert Python control flow over tensors.
        name: the step's name, for messages.
        axes: the axis along which each tensor argument was cut; None where it was passed whole.

    Returns:
        The trace.

    Raises:
        StepError: the function calls no distributed model.
    """
    # Its models may have been made before smp.shutdown.
    patch_keras()
    open_traces: list[_OpenTrace] = []

    def no_summaries() -> bool:
        """Refuses summaries where they would be written: often on rank 0 alone, whose trace has to be that of all."""
        announce(
            f"tf.summary writes nothing inside step {name!r}, which runs once per microbatch and in parts. "
            f"Return the value from the step, and write it outside; in Keras's loops, return it in the logs.",
            runtime.current().topology.rank,
        )
        return False

    @contextlib.contextmanager
    def scopes(recorder: Recorder) -> Iterator[None]:
        current = _OpenTrace(recorder)
        open_traces.append(current)
        before = set_step_being_traced(current)
        try:
            with (
                guarded.tracing_step(),
                tf.summary.record_if(no_summaries),
                tf.variable_creator_scope(current.creator),
                adapter.layers().tag_calls(recorder, is_distributed, current.layer_call, current.note_call),
            ):
                yield
        finally:
            set_step_being_traced(before)

    def call_with_axes(body: Callable[..., Any], tensors: Sequence[Any]) -> Any:
        open_traces[-1].axes = list(zip(tensors, axes, strict=False))
        return call(body, tensors)

    traced = trace(function, specs, call_with_axes, scopes=scopes, autograph=autograph, name=name)
    models = open_traces[-1].models
    if not models:
        raise StepError(
            f"Step {name!r} calls no distributed model and no layer of one, so there is nothing to split. Call a model "
            f"made by smp.DistributedModel, or by a subclass of it, inside the step."
        )
    for model in models:
        take_variables(model)
    lowered = lower(traced, _describe)
    values = dataclasses.replace(lowered, graph=as_values(lowered.graph))
    return StepTrace(traced, values, models, tuple(open_traces[-1].calls))


def of_one_microbatch(traced: StepTrace) -> StepTrace:
    """Returns the trace of a step that runs one microbatch, whose gradients may depend on states that it writes.

    Args:
        traced: the trace.
    """
    lowered = traced.lowered
    graph, again = read_before(lowered.graph)
    if not again:
        return traced
    variables = (*lowered.variables, *(lowered.variables[index] for index in again))
    return StepTrace(traced.trace, dataclasses.replace(lowered, graph=graph, variables=variables), traced.models)


def _describe(variable: tf.Variable) -> tuple[str, bool]:
    store = store_of(variable)
    if store is None:
        return variable.name.partition(":")[0], False
    state = store.state(variable)
    assert state is not None
    return state.name, True
