"""Finds the ops of two traces of a step, for a microbatch and for a whole batch, that are made at the same place.

Where one trace has made more ops, a name may stand for another op. `strided_slice_1` is `labels[:, :2]` in one and
`labels[:, 1:]` in the other. Then attributes differ, or constants that the ops are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smp_tf.partition.graph.node_def import attributes, constant
from smp_tf.partition.graph.op_graph import ARGUMENT, Node, OpGraph
from smp_tf.partition.graph.op_kinds import RANDOM_OPS

#: Attributes that follow the number of samples, or the process.
_OTHERS = frozenset({"container", "debug_name", "shape", "shared_name", "value"})


def same_places(whole: OpGraph, part: OpGraph, samples: int) -> list[int | None]:
    """Returns, for each node of one graph, the node of another that is made at the same place; None where none is.

    Args:
        whole: the graph for a whole batch.
        part: the graph for a microbatch.
        samples: number of samples of the whole batch.
    """
    by_name = [part.number_of.get(node.name) for node in whole.nodes]
    found: list[int | None] = []
    for number, other in enumerate(by_name):
        is_same = other is not None and _are_same(whole, number, part, other, by_name, samples)
        found.append(other if is_same else None)
    return found


def _are_same(
    whole: OpGraph, number: int, part: OpGraph, other_number: int, by_name: Sequence[int | None], samples: int
) -> bool:
    """Returns whether two nodes of the same name are made at the same place.

    Args:
        whole: the graph for a whole batch.
        number: a node of it.
        part: the graph for a microbatch.
        other_number: a node of it.
        by_name: for each node of `whole`, the one of that name in `part`.
        samples: number of samples of the whole batch.
    """
    node, other = whole.nodes[number], part.nodes[other_number]
    # In the part, random ops were made stateless.
    if other.op != node.op and not {other.op, node.op} <= RANDOM_OPS:
        return False
    if len(other.outputs) != len(node.outputs) or (node.op == ARGUMENT and other.source != node.source):
        return False
    if node.forward_of is not None and other.forward_of is not None:
        # A backward pass may begin with other ops where sizes are left open.
        return by_name[node.forward_of] == other.forward_of
    if node.op in RANDOM_OPS:
        return True
    # Where one trace has made more ops, a name may stand for another op.
    ours = tuple(map(by_name.__getitem__, whole.data_from[number]))
    return ours == part.data_from[other_number] and _are_alike(whole, node, part, other, samples)


def _are_alike(whole: OpGraph, node: Node, part: OpGraph, other: Node, samples: int) -> bool:
    """Returns whether two ops of the same name and type compute the same of their inputs."""
    if node.definition != other.definition and _fixed(node) != _fixed(other):
        return False
    for mine, its in zip(node.inputs, other.inputs, strict=True):
        one, another = whole.nodes[mine.node], part.nodes[its.node]
        if one.op == another.op == "Const" and not _is_same_constant(one, another, samples):
            return False
    return True


def _fixed(node: Node) -> dict[str, Any]:
    """Returns the attributes of a node that are the same for any number of samples, and in every trace."""
    return {
        name: value
        for name, value in attributes(node).items()
        if not (name.startswith("_") or name in _OTHERS or value.HasField("func") or value.list.func)
    }


def _is_same_constant(node: Node, other: Node, samples: int) -> bool:
    """Returns whether two constants are the same but for numbers of samples among them."""
    if node.definition == other.definition or node.outputs != other.outputs:
        return True
    if attributes(node)["value"] == attributes(other)["value"]:
        return True
    values, others = constant(node).reshape(-1), constant(other).reshape(-1)
    if values.dtype.kind != "i":
        return False
    return all(a == b or a % samples == 0 for a, b in zip(values.tolist(), others.tolist(), strict=True))
