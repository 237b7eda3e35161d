"""Tensors that are only names for the memory of other tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from smp_tf.partition.graph.op_graph import OpGraph, Tensor
from smp_tf.partition.graph.op_kinds import SAME_MEMORY_OPS
from smp_tf.partition.op_cost.passed_through import passed_through
from smp_tf.partition.op_cost.repeated_ops import repeated_ops
from smp_tf.partition.split.split import Segment


def memory_roots(
    graph: OpGraph, nodes: Collection[int], repeated: Mapping[int, int] | None = None
) -> dict[Tensor, Tensor]:
    """Returns, for every tensor that is only a name for another's memory, that other tensor.

    Args:
        graph: the op graph.
        nodes: nodes that run in one process, in order. What comes from elsewhere has memory of its own.
        repeated: nodes that do not run, since an earlier one makes the same, each with that one.
    """
    root: dict[Tensor, Tensor] = {}
    passed_by = passed_through(graph)
    for number in nodes:
        node = graph.nodes[number]
        if repeated and number in repeated:
            for index in range(len(node.outputs)):
                made = Tensor(repeated[number], index)
                root[Tensor(number, index)] = root.get(made, made)
            continue
        if node.op in SAME_MEMORY_OPS:
            for index, tensor in enumerate(node.inputs[: len(node.outputs)]):
                root[Tensor(number, index)] = root.get(tensor, tensor)
        for index, source in passed_by.get(number, {}).items():
            root[Tensor(number, index)] = root.get(node.inputs[source], node.inputs[source])
    return root


def roots_of_segments(graph: OpGraph, segments: Iterable[Segment]) -> dict[Tensor, Tensor]:
    """Returns the same for the segments of a stage. In each of them, an op that repeats another one does not run.

    Args:
        graph: the op graph.
        segments: the segments.
    """
    repeated: dict[int, int] = {}
    nodes: set[int] = set()
    for segment in segments:
        repeated |= repeated_ops(graph, segment.nodes, tuple(dict(segment.after)))
        nodes |= set(segment.nodes)
    return memory_roots(graph, sorted(nodes), repeated)
