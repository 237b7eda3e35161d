"""Calls a function in a graph by an op that shows TensorFlow's graph passes only the function's name.

    call(f, inputs, options, is_first=True)       0F0      SmpCall  function="f" functions=[f]
    call(f, inputs, options, is_first=False)      0F1      SmpCall  function="f" functions=[]

When a graph runs for the first time, TensorFlow copies the body of a function several times for each of its own call
ops. With 64 calls of a function, that was most of the first run's time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from smp_tf.ops.errors import NotDifferentiableError
from smp_tf.ops.graph_op import add_op, run_independently
from smp_tf.ops.library import tf_ops_library

__all__ = ["call", "calls_by_name"]


def calls_by_name() -> bool:
    """Returns whether functions are called in this way in this process, that is where there is no GPU or the like."""
    return all(device.device_type == "CPU" for device in tf.config.list_logical_devices())


def call(function: Any, inputs: Sequence[tf.Tensor], options: Mapping[str, bytes], *, is_first: bool) -> tf.Operation:
    """Calls a function in the graph that is being traced.

    The op is exempt from automatic control dependencies, as `send_recv.send` is. Order it by control dependencies. It
    runs once per execution of the graph.

    Args:
        function: A concrete function (`tf.types.experimental.ConcreteFunction`) of tensors that returns a list of
            tensors, or what has its attributes. XLA does not compile it.
        inputs: The function's arguments, without what it captures.
        options: The options that TensorFlow gives to its own calls: `config_proto`, by which its optimizer treats the
            function, and `executor_type`.
        is_first: Whether this is the first call of the function in the graph. All others have to be on its device.

    Returns:
        The op. Its outputs are those of the function, with unknown shapes.
    """
    tf_ops_library()
    graph = tf.compat.v1.get_default_graph()
    if is_first:
        function.add_to_graph(graph)
    operation = add_op(
        graph,
        "SmpCall",
        [*inputs, *function.captured_inputs],
        [output.dtype for output in function.outputs],
        _attributes(function, options, is_first),
    )
    run_independently(operation)
    return operation


def _attributes(function: Any, options: Mapping[str, bytes], is_first: bool) -> dict[str, Any]:
    value = tf.compat.v1.AttrValue
    name = tf.compat.as_bytes(function.name)
    named = value.ListValue(func=[tf.compat.v1.NameAttrList(name=name)] if is_first else [])
    return {
        "Tin": _types(function.inputs),
        "Tout": _types(function.outputs),
        "function": value(s=name),
        "functions": value(list=named),
        **{name: value(s=text) for name, text in options.items()},
    }


def _types(tensors: Sequence[tf.Tensor]) -> Any:
    value = tf.compat.v1.AttrValue
    return value(list=value.ListValue(type=[tensor.dtype.as_datatype_enum for tensor in tensors]))


def _refuse_gradient(operation: tf.Operation, *_: Any) -> Any:
    raise NotDifferentiableError(
        f"{operation.type} {operation.name!r} has no gradient: what a step returns cannot be differentiated outside of "
        f"it. Take the gradients within the step function, and return them."
    )


tf.RegisterGradient("SmpCall")(_refuse_gradient)
