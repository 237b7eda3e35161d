"""Ops that compute what an op before them has computed. TensorFlow runs only the first of them.

    x ─▶ Relu_0 ─▶ Pad_0          what reads Relu_1 or Pad_1 is given
    x ─▶ Relu_1 ─▶ Pad_1          what Relu_0 and Pad_0 have made

A layer that hands its input to several others often has such ops, one for each of the others. TensorFlow's graph
optimizer looks for them within one function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping

from smp_tf.partition.graph.graph_facts import graph_fact
from smp_tf.partition.graph.node_def import attributes
from smp_tf.partition.graph.op_graph import SOURCES, Node, OpGraph, Tensor
from smp_tf.partition.graph.op_kinds import FUNCTION_OPS, RANDOM_OPS

#: Ops that hand on what they are given, with its shape.
_SAME_VALUE_OPS = frozenset({"Identity", "StopGradient", "PreventGradient"})
#: Ops that are like no other.
_OWN_VALUE_OPS = SOURCES | FUNCTION_OPS | RANDOM_OPS
#: Bytes of a definition up to which constants are compared.
_COMPARED = 1024


@graph_fact
def repeated_ops(graph: OpGraph, nodes: tuple[int, ...], apart: tuple[int, ...] = ()) -> dict[int, int]:
    """Returns the nodes that compute what an earlier node has computed, each with the first such node.

    Args:
        graph: the op graph.
        nodes: nodes that run in one function, in order.
        apart: those of them that wait for other nodes besides what they read. They are taken to be like no other.
    """
    repeated: dict[int, int] = {}
    values: dict[Tensor, Tensor] = {}
    known: dict[Hashable, int] = {}
    for number in nodes:
        node = graph.nodes[number]
        if node.op in _SAME_VALUE_OPS and number not in apart and not node.control:
            values[Tensor(number, 0)] = values.get(node.inputs[0], node.inputs[0])
            continue
        if number in apart or not _is_comparable(node):
            continue
        inputs = tuple([values.get(tensor, tensor) for tensor in node.inputs])
        first = known.setdefault((inputs, node.control, _computation(node)), number)
        if first == number:
            continue
        repeated[number] = first
        values.update(zip(graph.tensors_of(number), graph.tensors_of(first), strict=True))
    return repeated


def without_repeated_ops(graph: OpGraph, repeated: Mapping[int, int]) -> OpGraph:
    """Returns the graph in which nothing reads repeated nodes, but what the first such node has made.

    Args:
        graph: the op graph.
        repeated: repeated nodes, each with the first such node.
    """
    if not repeated:
        return graph

    def first(tensor: Tensor) -> Tensor:
        return Tensor(repeated.get(tensor.node, tensor.node), tensor.index)

    nodes = list(graph.nodes)
    for number in {reader for each in repeated for reader in graph.data_to[each]}:
        nodes[number] = dataclasses.replace(nodes[number], inputs=tuple(map(first, nodes[number].inputs)))
    return dataclasses.replace(graph, nodes=tuple(nodes), outputs=tuple(map(first, graph.outputs)))


def _is_comparable(node: Node) -> bool:
    """Returns whether an op makes the same whenever it is given the same, and can be compared with others."""
    if node.stateful or node.reads or node.writes or not node.definition:
        return False
    return node.op not in _OWN_VALUE_OPS and len(node.definition) <= _COMPARED


def _computation(node: Node) -> Hashable:
    """Returns what an op makes of what it is given: its type, its attributes, and the shapes of what it gives."""
    attrs = attributes(node)
    named = [(name, attrs[name].SerializeToString(deterministic=True)) for name in sorted(attrs) if name[0] != "_"]
    return node.op, tuple(named), tuple([kind.shape for kind in node.outputs])
