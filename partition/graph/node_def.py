"""Reads the serialised parts of an op graph: NodeDefs and the function library.

TensorFlow is imported when something is first parsed, not when this file is imported. So a graph made by hand, with
empty definitions, is costed and cut without TensorFlow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smp_tf.partition.graph.graph_caches import graph_cache

if TYPE_CHECKING:
    from smp_tf.partition.graph.op_graph import Node

#: How deep calls of functions within functions are followed. Without a limit, a function that calls itself has no end.
MAX_DEPTH = 16


@graph_cache(4096)
def _parse_node(definition: bytes) -> Any:
    from tensorflow.core.framework import node_def_pb2

    return node_def_pb2.NodeDef.FromString(definition)


def attributes(node: Node) -> Any:
    """Returns the attributes of a node, AttrValues by name. A node without a definition has none."""
    if not node.definition:
        return {}
    return _parse_node(node.definition).attr


def constant(node: Node) -> Any:
    """Returns the value of a `Const`, a NumPy array."""
    import tensorflow as tf

    return tf.make_ndarray(attributes(node)["value"].tensor)


@graph_cache(8)
def functions(library: bytes) -> dict[str, Any]:
    """Returns the FunctionDefs of a serialised FunctionDefLibrary, by name."""
    if not library:
        return {}
    from tensorflow.core.framework import function_pb2

    parsed = function_pb2.FunctionDefLibrary.FromString(library)
    return {function.signature.name: function for function in parsed.function}


def bodies(attrs: Any) -> list[str]:
    """Returns the names of the functions that a node may run: the called one, a loop's body, the branches of a choice.

    Args:
        attrs: attributes of the node.

    Returns:
        Their names.
    """
    if "branches" in attrs:
        return [function.name for function in attrs["branches"].list.func]
    return [attrs[name].func.name for name in ("f", "body", "then_branch", "else_branch") if name in attrs]


def function_names(attrs: Any) -> list[str]:
    """Returns all names that may be functions: those that attributes refer to, and texts that look like a name.

    Args:
        attrs: attributes of a node or of a function. A fused LSTM names its counterpart for another device in a plain
            string.
    """
    names = []
    for attribute in attrs.values():
        if attribute.HasField("func"):
            names.append(attribute.func.name)
        elif attribute.HasField("s") and attribute.s.isascii():
            names.append(attribute.s.decode())
        names.extend(function.name for function in attribute.list.func)
    return names


def colocated_with(node: Node) -> tuple[str, ...]:
    """Returns the names of the nodes that a node must be placed with (its `_class` attribute)."""
    if b"_class" not in node.definition:
        return ()
    found = attributes(node)["_class"].list.s
    return tuple(s.decode()[len("loc:@") :] for s in found if s.startswith(b"loc:@"))


def in_order(function: Any) -> list[Any]:
    """Returns a function's nodes, each after the nodes it reads. A function's body may list them in any order."""
    by_name = {node.name: node for node in function.node_def}
    done: set[str] = set()
    order: list[Any] = []
    for first in function.node_def:
        stack = [first]
        while stack:
            node = stack[-1]
            needs = sorted({i.lstrip("^").partition(":")[0] for i in node.input})
            missing = [by_name[n] for n in needs if n in by_name and n not in done]
            if node.name in done or not missing:
                stack.pop()
                if node.name not in done:
                    done.add(node.name)
                    order.append(node)
            else:
                stack.extend(missing)
    return order
