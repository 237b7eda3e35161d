"""The body of a function as an op graph of its own, with the types that its tensors have in one call.

A function of the library says what its ops are, not how large their tensors are. That depends on the arguments of the
call. TensorFlow infers it from their types, among them the types of lists' entries and of variables:

    PartitionedCall(float32[128, 16, 512], list of float32[128, 512])
            │
            ▼
    argument 0 ──▶ Transpose ──▶ TensorListFromTensor ──▶ StatelessWhile ──▶ ...     float32[16, 128, 512], ...
    argument 1 ────────────────────────────────────────────────▲
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from smp_tf.partition.graph.graph_caches import graph_cache
from smp_tf.partition.graph.node_def import functions, in_order
from smp_tf.partition.graph.op_graph import ARGUMENT, Call, Node, OpGraph, Tensor, TensorType
from smp_tf.partition.graph.op_kinds import LOOP_OPS, SAME_MEMORY_OPS
from smp_tf.partition.op_cost.loop_lists import with_list_lengths

#: Ops that give as many elements as they take. The order of axes may be an argument; then the shape is unknown.
_AS_MANY_OPS = frozenset({"Transpose", "ConjugateTranspose", "Reshape", "ZerosLike", "OnesLike"})
#: Ops that give the list they take, with one entry added or replaced.
_EXTENDING_OPS = frozenset({"TensorListPushBack", "TensorListSetItem"})


@graph_cache(1024)
def function_graph(
    library: bytes, name: str, arguments: tuple[TensorType, ...], results: tuple[TensorType, ...], trips: int
) -> OpGraph:
    """Returns the op graph of a function's body in one call.

    Args:
        library: serialised FunctionDefLibrary with the function and those it calls.
        name: the function.
        arguments: types of the arguments. The type of a variable's handle has the variable's type as its `entry`.
        results: types of the results, as the caller knows them.
        trips: how often a loop runs where the body does not say it.

    Returns:
        The graph. It has a node `ARGUMENT` for each argument, in order, and then the ops. Its outputs are the results.
    """
    function = functions(library)[name]
    types, outputs = _inferred(library, function, arguments)
    taken_by = zip(function.signature.input_arg, arguments, strict=True)
    nodes = [Node(arg.name, ARGUMENT, (), (), (kind,)) for arg, kind in taken_by]
    number_of = {node.name: number for number, node in enumerate(nodes)}

    def tensor(reference: str) -> Tensor:
        """Returns the tensor that a reference, "argument" or "node:output:index", stands for."""
        of, _, rest = reference.partition(":")
        return Tensor(number_of[of], outputs[of][rest] if rest else 0)

    for definition in in_order(function):
        number_of[definition.name] = len(nodes)
        inputs = tuple(tensor(reference) for reference in definition.input if not reference.startswith("^"))
        before = tuple(number_of[reference[1:]] for reference in definition.input if reference.startswith("^"))
        taken = [nodes[tensor.node].outputs[tensor.index] for tensor in inputs]
        made = _completed(definition.op, types[definition.name], taken, trips)
        nodes.append(Node(definition.name, definition.op, inputs, before, made, definition.SerializeToString()))
    ends = tuple(tensor(function.ret[arg.name]) for arg in function.signature.output_arg)
    graph = OpGraph(tuple(nodes), (Call(0, "", "", None),), (), ends, library=library)
    return with_list_lengths(_refined(graph, results), trips)


def _completed(
    op: str, made: tuple[TensorType, ...], taken: Sequence[TensorType], trips: int
) -> tuple[TensorType, ...]:
    """Returns the types of an op's outputs, completed where TensorFlow does not infer them from the op's inputs."""
    if op in _AS_MANY_OPS and (taken[0].entry is not None or (taken[0].is_static and not made[0].is_static)):
        # Zeros like a list are a list of zeros.
        return (taken[0],)
    if op in _EXTENDING_OPS and made[0].entry is None:
        return (dataclasses.replace(made[0], entry=taken[0].entry or taken[-1]),)
    if op == "TensorListStack" and made[0].shape and made[0].shape[0] is None:
        return (TensorType(made[0].dtype, (trips, *made[0].shape[1:])),)
    if op in LOOP_OPS or op in SAME_MEMORY_OPS:
        # A loop gives lists like those that it was given.
        return tuple(
            dataclasses.replace(kind, entry=source.entry) if kind.dtype == "variant" and kind.entry is None else kind
            for kind, source in zip(made, taken, strict=False)
        )
    return made


def _refined(graph: OpGraph, results: Sequence[TensorType]) -> OpGraph:
    """Returns the graph with the types that the caller knows for its outputs."""
    nodes = list(graph.nodes)
    for tensor, kind in zip(graph.outputs, results, strict=True):
        while kind.is_static and (not graph.type_of(tensor).is_static or kind.entry != graph.type_of(tensor).entry):
            node = nodes[tensor.node]
            outputs = list(node.outputs)
            outputs[tensor.index] = kind
            nodes[tensor.node] = dataclasses.replace(node, outputs=tuple(outputs))
            if node.op not in ("Identity", "IdentityN"):
                break
            tensor = node.inputs[tensor.index]
    return dataclasses.replace(graph, nodes=tuple(nodes))


def _inferred(
    library: bytes, function: Any, arguments: Sequence[TensorType]
) -> tuple[dict[str, tuple[TensorType, ...]], dict[str, dict[str, int]]]:
    """Returns the types of the outputs of each node of a function, and the positions of "output:index" among them."""
    import tensorflow as tf

    from smp_tf.partition import tf_internals
    from smp_tf.partition.graph.tensor_types import tensor_type

    outputs = {node.name: dict(_places(node, tf_internals.op_definition(node.op))) for node in function.node_def}
    body = tf.compat.v1.GraphDef()
    body.library.ParseFromString(library)
    names = [arg.name for arg in function.signature.input_arg]
    flat = {name: f"{name}:0" for name in names}
    for node in function.node_def:
        flat |= {f"{node.name}:{place}": f"{node.name}:{index}" for place, index in outputs[node.name].items()}
    for node in function.node_def:
        copied = body.node.add()
        copied.CopyFrom(node)
        # An argument exists from the beginning.
        waits = [reference for reference in node.input if reference[0] == "^" and reference[1:] not in names]
        copied.input[:] = [*(flat[reference] for reference in node.input if reference[0] != "^"), *waits]
    graph = tf.Graph()
    with graph.as_default():
        read = {reference for node in body.node for reference in node.input}
        given = {
            flat[name]: tf_internals.typed_placeholder(
                kind.dtype, kind.shape, (kind.entry.dtype, kind.entry.shape) if kind.entry is not None else None
            )
            for name, kind in zip(names, arguments, strict=True)
            if flat[name] in read
        }
        tf.graph_util.import_graph_def(body, given, name="")
    types = {
        node.name: tuple(tensor_type(output) for output in graph.get_operation_by_name(node.name).outputs)
        for node in function.node_def
    }
    return types, outputs


def _places(node: Any, definition: Any) -> Iterator[tuple[str, int]]:
    """Yields the outputs of a node by "output:index", numbered."""
    number = 0
    for output in definition.output_arg:
        count = 1
        if output.number_attr:
            count = node.attr[output.number_attr].i
        elif output.type_list_attr:
            count = len(node.attr[output.type_list_attr].list.type)
        for index in range(count):
            yield f"{output.name}:{index}", number
            number += 1
