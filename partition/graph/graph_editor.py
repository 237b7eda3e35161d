"""Writes a changed copy of an op graph, node by node, in topological order."""

from __future__ import annotations

import dataclasses

from smp_tf.partition.graph.op_graph import Gradient, Node, OpGraph, Tensor


class GraphEditor:
    """Copies a graph and lets a pass insert nodes.

    Args:
        graph: the graph to copy.

    Example:
        >>> editor = GraphEditor(graph)
        >>> for number in range(len(graph.nodes)):
        ...     node = editor.moved_node(number)
        ...     editor.keep(number, node)
        >>> copy = editor.finish()
    """

    def __init__(self, graph: OpGraph) -> None:
        self._graph = graph
        self._nodes: list[Node] = []
        self._new_number: dict[int, int] = {}
        self._kept: list[int] = []

    def moved(self, tensor: Tensor) -> Tensor:
        """Returns where a tensor of the old graph is in the new one. The tensor's node must have been kept."""
        return Tensor(self._new_number[tensor.node], tensor.index)

    def moved_node(self, number: int) -> Node:
        """Returns an old node with its inputs renumbered, ready to be changed and kept."""
        node = self._graph.nodes[number]
        return dataclasses.replace(
            node,
            inputs=tuple(self.moved(t) for t in node.inputs),
            control=tuple(self._new_number[c] for c in node.control),
        )

    def add(self, node: Node) -> Tensor:
        """Appends a new node, whose inputs are of the new graph, and returns its first output."""
        self._nodes.append(node)
        return Tensor(len(self._nodes) - 1, 0)

    def keep(self, number: int, node: Node) -> None:
        """Appends the node that replaces an old one."""
        self._new_number[number] = len(self._nodes)
        self._kept.append(len(self._nodes))
        self._nodes.append(node)

    def finish(self, library: bytes | None = None) -> OpGraph:
        """Returns the new graph, checked.

        Args:
            library: the new function library; None for the old one.
        """
        nodes = list(self._nodes)
        for new in self._kept:
            # A backward op may come before the forward op it names, since a loop takes inputs that are made for its
            # gradient.
            forward_of = nodes[new].forward_of
            if forward_of is not None:
                nodes[new] = dataclasses.replace(nodes[new], forward_of=self._new_number[forward_of])
        result = dataclasses.replace(
            self._graph,
            nodes=tuple(nodes),
            outputs=tuple(self.moved(t) for t in self._graph.outputs),
            gradients=tuple(Gradient(g.variable, tuple(map(self.moved, g.tensors))) for g in self._graph.gradients),
            library=self._graph.library if library is None else library,
        )
        result.validate()
        return result
