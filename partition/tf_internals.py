"""The private parts of TensorFlow that tracing needs, each in one small function.

They work with TensorFlow 2.21. Each has a test in tests/partition/test_tf_internals.py that fails when TensorFlow
changes it.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, full_type_pb2, function_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.autograph.core import ag_ctx as autograph_context
from tensorflow.python.autograph.core import config as autograph_config
from tensorflow.python.autograph.core import config_lib as autograph_config_lib
from tensorflow.python.autograph.core import converter as autograph_core
from tensorflow.python.autograph.impl import api as autograph_api
from tensorflow.python.eager import backprop, record
from tensorflow.python.eager import context as eager_context
from tensorflow.python.eager.polymorphic_function import attributes as attributes_lib
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.framework import auto_control_deps_utils, func_graph, op_def_registry
from tensorflow.python.ops import gradients_util, handle_data_util, resource_variable_ops
from tensorflow.python.util import _pywrap_util_port


@contextlib.contextmanager
def watch_gradient_functions(note: Callable[[Sequence[Any], Sequence[Any], str, str], Any]) -> Iterator[None]:
    """Wraps, within its context, every gradient function that a tape or `tf.gradients` calls.

    Args:
        note: called with (inputs, outputs, op type, name scope) of the forward op before its gradient function runs. It
            returns a context manager, which is entered while the gradient function makes its ops. Tensors that the
            gradient function does not need may be None.
    """
    original = backprop._gradient_function

    def tape_gradient_function(op_name, attrs, num_inputs, inputs, outputs, *rest):  # type: ignore[no-untyped-def]
        with note(inputs, outputs, op_name, rest[-1] or ""):
            return original(op_name, attrs, num_inputs, inputs, outputs, *rest)

    original_maybe_compile = gradients_util._MaybeCompile

    def symbolic_gradient_function(scope, op, func, grad_fn):  # type: ignore[no-untyped-def]
        with note(op.inputs, op.outputs, op.type, op.name.rpartition("/")[0]):
            return original_maybe_compile(scope, op, func, grad_fn)

    pywrap_tfe.TFE_Py_RegisterGradientFunction(tape_gradient_function)
    gradients_util._MaybeCompile = symbolic_gradient_function
    try:
        yield
    finally:
        pywrap_tfe.TFE_Py_RegisterGradientFunction(original)
        gradients_util._MaybeCompile = original_maybe_compile


@contextlib.contextmanager
def watch_symbolic_gradients(note: Callable[[Callable[[], Any], Any], Any]) -> Iterator[None]:
    """Passes, within its context, every computation of symbolic gradients (`tf.gradients`) to `note`.

    Args:
        note: called with (compute, sources). It must return what `compute()` returns.
    """
    original = gradients_util._GradientsHelper

    def helper(ys, xs, *args, **kwargs):  # type: ignore[no-untyped-def]
        return note(lambda: original(ys, xs, *args, **kwargs), xs)

    gradients_util._GradientsHelper = helper
    try:
        yield
    finally:
        gradients_util._GradientsHelper = original


@contextlib.contextmanager
def watch_recorded_operations(note: Callable[[Sequence[Any], Sequence[Any], str, str], Any]) -> Iterator[None]:
    """Wraps, within its context, every backward function that is handed directly to the tapes.

    Custom gradients, recomputation and calls of functions are recorded in this way. No gradient function is looked up
    for them.

    Args:
        note: takes the forward op's inputs, outputs, type and name, and returns a context for the function's call.
    """
    names = ("record_operation", "record_operation_backprop_only")
    originals = {name: getattr(record, name) for name in names}

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(op_type, output_tensors, input_tensors, backward_function, *rest, **more):  # type: ignore[no-untyped-def]
            inputs, outputs = list(input_tensors), list(output_tensors)

            def noted(*args: Any, **kwargs: Any) -> Any:
                with note(inputs, outputs, str(op_type), ""):
                    return backward_function(*args, **kwargs)

            return original(op_type, output_tensors, input_tensors, noted, *rest, **more)

        return recorded

    for name, original in originals.items():
        setattr(record, name, wrap(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(record, name, original)


@contextlib.contextmanager
def inline_functions() -> Iterator[None]:
    """Lets, within its context, a call of a `tf.function` trace its body into the current graph, as if not decorated.

    Otherwise a model called inside a function would be one op, which no cut can divide. Functions that are to be
    compiled stay whole. So do functions with attributes, since TensorFlow finds the device versions of Keras's LSTM and
    GRU by these.
    """
    original = polymorphic_function.Function.__call__

    def inlined(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function._jit_compile or function._attributes:
            return original(function, *args, **kwargs)
        body = function.python_function
        return (autograph_convert(body) if function._autograph else body)(*args, **kwargs)

    polymorphic_function.Function.__call__ = inlined
    try:
        yield
    finally:
        polymorphic_function.Function.__call__ = original


def make_plain_variable(**arguments: Any) -> tf.Variable:
    """Returns a resource variable, made at once, outside any graph and past every variable creator scope.

    One such scope is that of a `tf.function` that is traced again. It lets no variable be made.
    """
    with tf.init_scope():
        return resource_variable_ops.ResourceVariable(**arguments)


def is_stateful(op_type: str) -> bool:
    """Returns whether TensorFlow registers an op type as stateful. Unknown types count as stateful."""
    op_def = op_def_registry.get(op_type)
    return True if op_def is None else bool(op_def.is_stateful)


def resource_uses(op: tf.Operation) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Returns the resource inputs that an op only reads, and those that it may write, also in functions."""
    reads, writes = auto_control_deps_utils.get_read_write_resource_inputs(op)
    return list(reads), list(writes)


def list_entry(tensor: tf.Tensor) -> tuple[tf.DType, tf.TensorShape] | None:
    """Returns the type and shape of the entries of a variant that is a list of tensors; None for any other tensor."""
    data = handle_data_util.get_resource_handle_data(tensor)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    (kind,) = data.shape_and_type
    return tf.as_dtype(kind.dtype), tf.TensorShape(kind.shape)


def op_definition(op_type: str) -> Any:
    """Returns TensorFlow's OpDef of an op type.

    Raises:
        KeyError: TensorFlow knows no such type.
    """
    definition = op_def_registry.get(op_type)
    if definition is None:
        raise KeyError(op_type)
    return definition


def typed_placeholder(dtype: str, shape: Sequence[int | None] | None, entry: tuple[str, Any] | None) -> tf.Tensor:
    """Returns a placeholder in the current graph, whose type TensorFlow can infer other types from.

    Args:
        dtype: its type.
        shape: its shape, as far as it is known.
        entry: type and shape of the entries for a list of tensors, or of the value for the handle of a variable.
    """
    made = tf.compat.v1.placeholder(dtype, None if shape is None else list(shape))
    if entry is not None:
        of = tf.TensorShape(None if entry[1] is None else list(entry[1]))
        data = handle_data_util.create_handle_data(of, tf.as_dtype(entry[0]))
        if made.dtype == tf.variant:
            # Ops on lists take nothing else.
            data.shape_and_type[0].type.type_id = full_type_pb2.TFT_ARRAY
        handle_data_util.set_handle_data(made, data)
    return made


def capture(graph: func_graph.FuncGraph, tensor: tf.Tensor) -> tf.Tensor:
    """Returns the placeholder through which a function being traced sees a tensor from outside."""
    return graph.capture(tensor)


def current_graph() -> func_graph.FuncGraph:
    """Returns the graph of the function being traced."""
    return tf.compat.v1.get_default_graph()


def autograph_convert(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with Python's control flow over tensors turned into TensorFlow's, as `tf.function` does."""
    options = autograph_core.ConversionOptions(recursive=True, user_requested=True, optional_features=None)

    def converted(*args: Any, **kwargs: Any) -> Any:
        # Within a tf.function that does not convert its own code, conversion is off and has to be switched on.
        with autograph_context.ControlStatusCtx(status=autograph_context.Status.ENABLED, options=options):
            return autograph_api.converted_call(function, args, kwargs, options=options)

    return converted


def leave_unconverted(module: str) -> None:
    """Makes AutoGraph leave a module's code as it is when a function that AutoGraph converts calls it."""
    rule = autograph_config_lib.DoNotConvert(module)
    if all(str(rule) != str(known) for known in autograph_config.CONVERSION_RULES):
        autograph_config.CONVERSION_RULES = (rule, *autograph_config.CONVERSION_RULES)


def attributes_of_call(call: tf.Operation) -> dict[str, Any]:
    """Returns attributes for other calls of the function that an op calls. They spare looking into its body.

    Without them, TensorFlow goes through the function's body for every call, to find the shapes of the results.

    Args:
        call: a `PartitionedCall` or `StatefulPartitionedCall`.
    """
    return {**call.node_def.attr, attributes_lib.DISABLE_CALL_SHAPE_INFERENCE: attr_value_pb2.AttrValue(b=True)}


def call_options() -> dict[str, bytes]:
    """Returns what every call in a graph is given: how TensorFlow optimizes the function, and what executes it."""
    options = eager_context.context().function_call_options.as_attrs()
    return {name: tf.compat.as_bytes(value) for name, value in options.items()}


class KeptFunctions:
    """Functions that the runtime knows as long as this object lives.

    TensorFlow drops a function that was traced for an op, such as the body of a loop, with the graph that has the op.
    Nor does importing a graph make functions known that were written by hand. The runtime counts who needs a function.

    Args:
        definitions: the functions. Where the runtime knows one by its name, that one is kept.
    """

    def __init__(self, definitions: Iterable[function_pb2.FunctionDef]) -> None:
        runtime, names = eager_context.context(), []
        for definition in definitions:
            name = definition.signature.name
            runtime.add_function_def(runtime.get_function_def(name) if runtime.has_function(name) else definition)
            names.append(name)
        # At the end of the process the runtime goes with all that it knows.
        weakref.finalize(self, _leave, runtime, names).atexit = False


def _leave(runtime: Any, names: Sequence[str]) -> None:
    for name in names:
        runtime.remove_function(name)


class TracedFunction:
    """A traced function without its graph. It has what a concrete function is called by, under the same names.

    A concrete function keeps its graph in memory. TensorFlow's runtime has a copy of it, and runs that copy.

    Args:
        traced: a concrete function that takes tensors and returns a list of them. Nothing else needs its graph.
        calls: functions that it calls, besides those that its graph has made.
    """

    def __init__(self, traced: Any, calls: KeptFunctions) -> None:
        self._function, self._calls = traced.inference_fn, calls
        self.name: bytes = traced.name
        #: Tensors from outside that it is given after its arguments.
        self.captured_inputs: tuple[tf.Tensor, ...] = tuple(traced.captured_inputs)
        #: Types of its arguments and, after them, of these tensors.
        self.inputs: tuple[tf.TensorSpec, ...] = tuple(tf.TensorSpec(t.shape, t.dtype) for t in traced.inputs)
        #: Types of its results.
        self.outputs: tuple[tf.TensorSpec, ...] = tuple(tf.TensorSpec(t.shape, t.dtype) for t in traced.outputs)
        # Where it is needed again, TensorFlow makes it of the runtime's copy.
        self._function._cached_graph = None

    def __call__(self, *arguments: Any) -> list[tf.Tensor]:
        """Calls the function by TensorFlow's own op, eagerly or in the graph that is being traced.

        Args:
            *arguments: its arguments, without the tensors from outside.
        """
        given = [tf.convert_to_tensor(argument) for argument in arguments]
        return list(self._function.call_flat(*given, *self.captured_inputs) or ())

    def add_to_graph(self, graph: Any) -> None:
        """Makes the function known to a graph, whose ops may then call it by its name."""
        graph._add_function_recursive(self._function)

    @property
    def function_def(self) -> function_pb2.FunctionDef:
        """The runtime's copy."""
        return self._function.definition

    @property
    def graph(self) -> Any:
        """The function's graph, made anew."""
        return self._function.graph


def why_xla_cannot(function: Any, specs: Sequence[tf.TensorSpec], unknown: int) -> str | None:
    """Returns why XLA cannot compile a `tf.function` for arguments of given types; None where it can.

    XLA is asked only for its own representation of the function. There it refuses the ops that it does not have.

    Args:
        function: made with `jit_compile=True`.
        specs: the types of its arguments.
        unknown: length to try for dimensions that are not known.
    """
    tried = [
        spec if spec.shape.is_fully_defined() else tf.TensorSpec([d or unknown for d in spec.shape], spec.dtype)
        for spec in specs
        if spec.shape.rank is not None
    ]
    if len(tried) < len(specs):
        return "it takes a tensor of unknown rank"
    # Where a function runs that names no device. If this is left out, TensorFlow draws a random number to find out. It
    # refuses to draw where ops are to be deterministic and nothing is seeded yet.
    device = [*tf.config.list_logical_devices("GPU"), *tf.config.list_logical_devices("CPU")][0].name
    try:
        with tf.init_scope(), warnings.catch_warnings():
            # The message says to name a platform instead. But with a platform TensorFlow draws that number all the
            # same.
            warnings.simplefilter("ignore")
            function.experimental_get_compiler_ir(*tried)(stage="hlo", device_name=device)
    except (tf.errors.OpError, ValueError, TypeError) as error:
        said = str(error)
        return " ".join(said.partition(" on XLA_")[2].partition(": ")[2].partition("{{")[0].split()) or said
    return None


def has_onednn() -> bool:
    """Returns whether TensorFlow computes with oneDNN on a processor: where it can, unless it is switched off."""
    return bool(_pywrap_util_port.IsMklEnabled())
