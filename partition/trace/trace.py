"""Traces a step function for one microbatch and notes, op by op, who made it.

The step is traced like any `tf.function`, forward and backward together. Meanwhile the recorder notes the number of ops
in the graph whenever something begins or ends. So no op creation has to be hooked:

    op number    0 ........ 12 ........ 30 ........ 47 ........ 61
    layer calls     [ net ....[ dense_1 ][ dense_2 ]...]
    gradients                                          [ tape.gradient ........ ]
    gradient functions                                  [ of dense_2/MatMul ][ of dense_1/Relu ]

An op belongs to the innermost call around it. A backward op belongs to the forward op whose gradient function made it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from smp_tf.partition import tf_internals
from smp_tf.partition.errors import TraceError
from smp_tf.partition.graph.op_graph import Call


@dataclasses.dataclass(frozen=True, slots=True)
class OpSpan:
    """A range of op numbers, `start` to `end` (exclusive): the ops that were made during one event."""

    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class CallSpan(OpSpan):
    """Ops made within one layer call."""

    call: int


@dataclasses.dataclass(frozen=True, slots=True)
class GradientFunctionSpan(OpSpan):
    """Ops made by the gradient function of one forward op, with what is known of that op."""

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    op_type: str
    scope: str


@dataclasses.dataclass(frozen=True, slots=True)
class TakenGradient:
    """One result of taking gradients: the variable, and the gradient's tensors (1 if dense, 3 if sparse)."""

    variable: tf.Variable
    tensors: tuple[tf.Tensor, ...]


class Recorder:
    """Writes down layer calls and gradient computations while a step function is being traced.

    A layer tagger calls `call` around every layer call:

        with recorder.call("dense_1", "Dense"):
            return original_call(layer, *args)
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self.calls: list[Call] = [Call(0, "", "", None)]
        self.call_spans: list[CallSpan] = []
        self.backward_spans: list[OpSpan] = []
        self.function_spans: list[GradientFunctionSpan] = []
        self.gradients: list[TakenGradient] = []
        self._open: list[int] = [0]
        self._stages: list[int | None] = [None]

    def _number(self) -> int:
        return int(self._graph.version)

    @property
    def in_call(self) -> bool:
        """Returns whether a layer call is being traced right now."""
        return len(self._open) > 1

    @property
    def in_nested_graph(self) -> bool:
        """Returns whether ops made now go into a branch, a loop or a function, and not into the step's graph itself."""
        return tf_internals.current_graph() is not self._graph

    @contextlib.contextmanager
    def call(self, name: str, class_name: str, stage: int | None = None) -> Iterator[None]:
        """Assigns the ops that are made within its context to a new call of the named layer.

        Args:
            name: name of the layer.
            class_name: class of the layer, for reports.
            stage: the stage that the script asked for, or None to take the surrounding one.
        """
        parent = self._open[-1]
        prefix = self.calls[parent].path
        index = len(self.calls)
        wanted = stage if stage is not None else self._stages[-1]
        self.calls.append(Call(index, f"{prefix}/{name}" if prefix else name, class_name, parent, wanted))
        self._open.append(index)
        self._stages.append(wanted)
        start = self._number()
        slot = len(self.call_spans)
        self.call_spans.append(CallSpan(start, start, index))
        try:
            yield
        finally:
            self._open.pop()
            self._stages.pop()
            self.call_spans[slot] = CallSpan(start, self._number(), index)

    def taking_gradients(self, compute: Callable[[], Any], sources: Any) -> Any:
        """Runs `compute`, and notes its ops as backward and its results as gradients of `sources`."""
        if self.in_nested_graph:
            return compute()
        start = self._number()
        results = compute()
        self.backward_spans.append(OpSpan(start, self._number()))
        flat_sources = tf.nest.flatten(sources)
        flat_results = list(results) if len(flat_sources) > 1 and isinstance(results, (list, tuple)) else None
        if flat_results is None or len(flat_results) != len(flat_sources):
            flat_results = tf.nest.flatten(results)
        for source, result in zip(flat_sources, flat_results, strict=False):
            if result is None or not isinstance(source, tf.Variable):
                continue
            if isinstance(result, tf.IndexedSlices):
                shape = () if result.dense_shape is None else (result.dense_shape,)
                self.gradients.append(TakenGradient(source, (result.values, result.indices, *shape)))
            else:
                self.gradients.append(TakenGradient(source, (result,)))
        return results

    @contextlib.contextmanager
    def gradient_function(
        self, inputs: Sequence[Any], outputs: Sequence[Any], op_type: str, scope: str
    ) -> Iterator[None]:
        """Marks the ops that are made within its context as the gradient of one forward op."""
        if self.in_nested_graph:
            yield
            return
        start = self._number()
        yield
        self.function_spans.append(
            GradientFunctionSpan(start, self._number(), tuple(inputs or ()), tuple(outputs or ()), op_type, scope)
        )


@dataclasses.dataclass(frozen=True)
class Trace:
    """A traced step: TensorFlow's graph of one microbatch, and what is known of how its ops were made.

    Args:
        graph: the traced FuncGraph.
        function: the traced function. It takes the arguments and returns the tensors in `results`, flattened.
        arguments: the graph's placeholders for the step's tensor arguments, flattened. Composite tensors are taken
            apart.
        results: what the step function returned, with the graph's symbolic tensors in it.
        recorder: what was noted during the trace.
        length: number of ops that the body made. Later ops only return the results.
        key: what tells this trace from all others, also after it is gone.
    """

    graph: Any
    function: Callable[..., Any]
    arguments: tuple[tf.Tensor, ...]
    results: Any
    recorder: Recorder
    length: int
    key: object = dataclasses.field(default_factory=object)

    @functools.cached_property
    def definition(self) -> Any:
        """Returns the graph as TensorFlow stores it, a GraphDef. Nobody may change it."""
        return self.graph.as_graph_def()


@contextlib.contextmanager
def _watch_gradient_tape(recorder: Recorder) -> Iterator[None]:
    """Notes what `tf.GradientTape` computes. The tape's public methods are wrapped for the time of the trace."""
    originals = {name: getattr(tf.GradientTape, name) for name in ("gradient", "jacobian", "batch_jacobian")}

    def wrap(original: Callable[..., Any], is_gradient: bool) -> Callable[..., Any]:
        def watched(tape: tf.GradientTape, target: Any, sources: Any = None, *args: Any, **kwargs: Any) -> Any:
            noted = sources if is_gradient else ()
            if sources is None:  # given by keyword under another name: batch_jacobian calls it `source`
                return recorder.taking_gradients(lambda: original(tape, target, *args, **kwargs), ())
            return recorder.taking_gradients(lambda: original(tape, target, sources, *args, **kwargs), noted)

        return watched

    for name, original in originals.items():
        setattr(tf.GradientTape, name, wrap(original, name == "gradient"))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(tf.GradientTape, name, original)


def _inside(graph: Any) -> Callable[[Any], Any]:
    """Returns a function that turns what a step returned into tensors of its graph, and leaves other objects alone."""

    def convert(value: Any) -> Any:
        if isinstance(value, tf.Variable):
            return tf.convert_to_tensor(value)
        if isinstance(value, tf.Tensor) and getattr(value, "graph", None) is not graph:
            return tf.identity(value)
        return value

    return convert


def trace(
    function: Callable[..., Any],
    specs: Sequence[tf.TypeSpec],
    call: Callable[[Callable[..., Any], list[Any]], Any],
    *,
    scopes: Callable[[Recorder], contextlib.AbstractContextManager[Any]],
    autograph: bool = True,
    name: str = "step",
) -> Trace:
    """Traces one microbatch of a step.

    Args:
        function: the user's step function.
        specs: types of its tensor arguments for one microbatch, flattened.
        call: takes the (converted) function and the traced tensors, and calls the function with its real signature.
        scopes: takes the recorder and returns a context. In it, layers announce their calls to the recorder, and
            variables are created as the caller wants. It is entered inside the traced function, so that it wins over
            TensorFlow's own context.
        autograph: whether to convert Python control flow over tensors.
        name: name of the graph, for messages.

    Returns:
        The trace.

    Raises:
        TraceError: the traced graph does not take the tensors that `specs` says.
    """
    kept: dict[str, Any] = {}

    def one_microbatch(*tensors: Any) -> Any:
        graph = tf_internals.current_graph()
        recorder = Recorder(graph)
        body = tf_internals.autograph_convert(function) if autograph else function
        with contextlib.ExitStack() as stack:
            stack.enter_context(scopes(recorder))
            stack.enter_context(_watch_gradient_tape(recorder))
            stack.enter_context(tf_internals.watch_symbolic_gradients(recorder.taking_gradients))
            stack.enter_context(tf_internals.watch_gradient_functions(recorder.gradient_function))
            stack.enter_context(tf_internals.watch_recorded_operations(recorder.gradient_function))
            stack.enter_context(tf_internals.inline_functions())
            results = tf.nest.map_structure(_inside(graph), call(body, list(tensors)), expand_composites=True)
        kept["recorder"] = recorder
        kept["results"] = results
        kept["length"] = int(graph.version)
        return [t for t in tf.nest.flatten(results, expand_composites=True) if isinstance(t, tf.Tensor)]

    one_microbatch.__name__ = name
    # AutoGraph converts the user's function (above), never this library's own code.
    traced = tf.function(one_microbatch, autograph=False).get_concrete_function(*specs)
    graph = traced.graph
    captured = {id(placeholder) for placeholder in graph.internal_captures}
    arguments = tuple(t for t in graph.inputs if id(t) not in captured)
    expected = len(tf.nest.flatten(list(specs), expand_composites=True))
    if len(arguments) != expected:
        raise TraceError(
            f"Tracing the step {name!r} gave {len(arguments)} argument tensors where {expected} were passed in."
        )
    return Trace(graph, traced, arguments, kept["results"], kept["recorder"], kept["length"])
