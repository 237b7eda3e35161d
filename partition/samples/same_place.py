"""Tells whether ops of two traces of a step, for a microbatch and for a whole batch, are made at the same place.

Where one trace has made more ops, a name may stand for another op. `strided_slice_1` is `labels[:, :2]` in one and
`labels[:, 1:]` in the other. Then attributes differ, or constants that the ops are given.
"""

from __future__ import annotations

from typing import Any

from smp_tf.partition.graph.node_def import attributes, constant
from smp_tf.partition.graph.op_graph import Node, OpGraph

#: Attributes that follow the number of samples, or the process.
_OTHERS = frozenset({"container", "debug_name", "shape", "shared_name", "value"})


def are_alike(whole: OpGraph, node: Node, part: OpGraph, other: Node, samples: int) -> bool:
    """Returns whether two ops of the same name and type compute the same of their inputs.

    Args:
        whole: the graph for a whole batch.
        node: a node of it.
        part: the graph for a microbatch.
        other: a node of it.
        samples: number of samples of the whole batch.
    """
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
