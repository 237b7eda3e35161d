"""Sums contributions to one tensor before they are sent.

The gradient of a tensor with several readers is the sum of what each reader gives back. Where two readers are on one
chunk and the sum is made on another, their contributions are added first and sent as one:

    chunk 2:  a ─┐                       chunk 2:  a ─┐
    chunk 2:  b ─┼─▶ AddN on chunk 1       chunk 2:  b ─┴▶ AddN ──▶ AddN on chunk 1
    chunk 1:  c ─┘                       chunk 1:  c ──────────────┘
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from tensorflow.core.framework import node_def_pb2

from smp_tf.partition.graph.graph_editor import GraphEditor
from smp_tf.partition.graph.op_graph import OpGraph, Tensor
from smp_tf.partition.split.assign import Assignment, Role


def sum_before_sending(assignment: Assignment) -> OpGraph:
    """Adds an AddN on every chunk that would send two or more summands of one sum.

    Args:
        assignment: a placed graph.

    Returns:
        The graph with the added nodes, to be placed anew; the same graph where there was nothing to do.
    """
    graph, places = assignment.graph, assignment.places
    grouped: dict[int, dict[int, list[Tensor]]] = {}
    for number, node in enumerate(graph.nodes):
        place = places[number]
        if node.op != "AddN" or place.role is not Role.HOME:
            continue
        by_chunk: dict[int, list[Tensor]] = defaultdict(list)
        for tensor in node.inputs:
            source = places[tensor.node]
            if source.role is Role.HOME and source.chunk is not None and source.chunk != place.chunk:
                by_chunk[source.chunk].append(tensor)
        shared = {chunk: tensors for chunk, tensors in by_chunk.items() if len(tensors) > 1}
        if shared:
            grouped[number] = shared
    return _rebuilt(graph, grouped) if grouped else graph


def _rebuilt(graph: OpGraph, grouped: dict[int, dict[int, list[Tensor]]]) -> OpGraph:
    editor = GraphEditor(graph)
    for number in range(len(graph.nodes)):
        node = editor.moved_node(number)
        for chunk, tensors in sorted(grouped.get(number, {}).items()):
            summands = {editor.moved(t) for t in tensors}
            parts = tuple(t for t in node.inputs if t in summands)
            name = f"{node.name}/sum_of_chunk_{chunk}"
            definition = _resized(node.definition, name, len(parts))
            part = dataclasses.replace(
                node, name=name, inputs=parts, control=(), forward_of=None, definition=definition
            )
            rest = tuple(t for t in node.inputs if t not in summands)
            node = dataclasses.replace(node, inputs=(*rest, editor.add(part)))
        if number in grouped:
            node = dataclasses.replace(node, definition=_resized(node.definition, node.name, len(node.inputs)))
        editor.keep(number, node)
    return editor.finish()


def _resized(definition: bytes, name: str, summands: int) -> bytes:
    node = node_def_pb2.NodeDef.FromString(definition)
    node.name = name
    node.attr["N"].i = summands
    return node.SerializeToString(deterministic=True)
