"""Ops that TensorFlow computes once, since all that they read is constant. What they make stays in memory.

    Const ─▶ Fill ─▶ Pad ─┐                computed when the function is prepared, and kept
    x ─▶ ZerosLike ───────┼─▶ While        also, where the shape of x is known
    x ────────────────────┘

The gradient of a recurrent layer begins with zeros: for its kernels, and for outputs that nothing reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from smp_tf.partition.graph.op_graph import SOURCES, Node, OpGraph, Tensor
from smp_tf.partition.graph.op_kinds import FUNCTION_OPS, RANDOM_OPS

#: Ops whose value only the shape of their input says.
_OF_SHAPE_OPS = frozenset({"ZerosLike", "OnesLike", "Shape", "ShapeN", "Size", "Rank"})
#: Of these, TensorFlow notes one number, so that they may be as large as they like.
_UNIFORM_OPS = frozenset({"ZerosLike", "OnesLike", "Fill"})
#: Ops that are computed anew whatever they are given.
_NEVER_FOLDED_OPS = SOURCES | FUNCTION_OPS | RANDOM_OPS
#: Larger constants are not made of others.
_LARGEST = 10 << 20


def folded_nodes(graph: OpGraph, nodes: Iterable[int], constant: Collection[int] = ()) -> frozenset[int]:
    """Returns the nodes that are computed once, constants among them.

    Args:
        graph: the op graph.
        nodes: nodes that run in one function, in order.
        constant: nodes that hand in a constant.
    """
    found = set(constant)
    for number in nodes:
        node = graph.nodes[number]
        if node.op == "Const" or _is_folded(graph, node, found):
            found.add(number)
    return frozenset(found.difference(constant))


def _is_folded(graph: OpGraph, node: Node, constant: Collection[int]) -> bool:
    """Returns whether an op is computed once, given the nodes before it that are."""
    if node.stateful or node.reads or node.writes or node.op in _NEVER_FOLDED_OPS or not node.inputs:
        return False
    if node.op not in _OF_SHAPE_OPS and (node.control or not all([t.node in constant for t in node.inputs])):
        return False
    if not all(kind.is_static and kind.nbytes() for kind in node.outputs):
        return False
    if node.op in _OF_SHAPE_OPS:
        return all(graph.type_of(tensor).is_static for tensor in node.inputs)
    return node.op in _UNIFORM_OPS or all(kind.nbytes() <= _LARGEST for kind in node.outputs)


def kept_constants(
    graph: OpGraph, nodes: Iterable[int], folded: Collection[int], outputs: Iterable[Tensor]
) -> tuple[Tensor, ...]:
    """Returns the outputs of folded nodes that stay in memory: those that something reads which is not folded.

    Args:
        graph: the op graph.
        nodes: nodes that run in one function.
        folded: those of them that are computed once.
        outputs: what the function returns.
    """
    read = {tensor for number in nodes if number not in folded for tensor in graph.nodes[number].inputs}
    return tuple(sorted(tensor for tensor in read.union(outputs) if tensor.node in folded))
