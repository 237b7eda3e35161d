"""Tells what the tensors of a step are made of that was traced with the number of samples left open.

Which dimension holds the samples is told by lengths that differ (`sample_rows.py`), and here none is known. So it is
looked up in the graph of the same step for a batch of one size, where ops have the same names:

    batch of 7 samples     losses [7]  ──▶ Sum ──▶ Div ◀── Const 7
    batch of any size      losses [?]  ──▶ Sum ──▶ Div ◀── Size ◀── losses

An op that is another one there, such as `Size` above, is taken to mix the samples of what it is given.
"""

from __future__ import annotations

from functools import cached_property

from smp_tf.partition.graph.op_graph import ARGUMENT, SOURCES, VARIABLE, Node, OpGraph, Tensor
from smp_tf.partition.graph.op_kinds import RANDOM_OPS
from smp_tf.partition.samples.sample_rows import Content, Rows, reads_state


class RowsOfAnySize:
    """The contents of the tensors of a step's graph for a batch of any size.

    Args:
        rows: what the tensors of the graph for a batch of one size are made of.
        sized: that graph.
        graph: the graph for a batch of any size.
    """

    def __init__(self, rows: Rows, sized: OpGraph, graph: OpGraph) -> None:
        self._rows = rows
        self._sized = sized
        self._graph = graph

    def of(self, tensor: Tensor) -> Content:
        """Returns what a tensor is made of."""
        return self._contents[tensor.node][tensor.index]

    def in_part(self, tensor: Tensor) -> Tensor | None:
        """Returns the tensor of a microbatch's graph that is made at the same place; None where there is none."""
        same = self._same[tensor.node]
        return None if same is None else self._rows.in_part(Tensor(same, tensor.index))

    def differs(self, tensor: Tensor) -> tuple[int, ...] | None:
        """Returns the dimensions of a tensor whose length differs for a microbatch; None where this cannot be told."""
        same = self._same[tensor.node]
        return None if same is None else self._rows.differs(Tensor(same, tensor.index))

    def has_one_row_each(self, tensor: Tensor) -> bool:
        """Returns whether a tensor that holds rows has one for each sample, as far as its shape is known."""
        same = self._same[tensor.node]
        return same is None or self._rows.has_one_row_each(Tensor(same, tensor.index))

    @cached_property
    def _same(self) -> list[int | None]:
        """For every node, the same one in the graph for a batch of one size."""
        found: list[int | None] = []
        for node in self._graph.nodes:
            number = self._sized.number_of.get(node.name)
            other = self._sized.nodes[number] if number is not None else None
            is_same = other is not None and other.op == node.op and len(other.outputs) == len(node.outputs)
            if is_same and other is not None:
                ours = [self._graph.nodes[t.node].name for t in node.inputs]
                is_same = ours == [self._sized.nodes[t.node].name for t in other.inputs]
            found.append(number if is_same else None)
        return found

    @cached_property
    def _contents(self) -> list[tuple[Content, ...]]:
        found: list[tuple[Content, ...]] = []
        for number, node in enumerate(self._graph.nodes):
            same = self._same[number]
            if same is None:
                given = [found[t.node][t.index] for t in node.inputs]
                found.append((self._of_another(node, given),) * len(node.outputs))
            else:
                found.append(tuple(self._rows.of(Tensor(same, index)) for index in range(len(node.outputs))))
        return found

    def _of_another(self, node: Node, given: list[Content]) -> Content:
        """Returns what a node gives that is another one in the graph for a batch of one size."""
        if node.op in SOURCES:
            is_weight = node.op == VARIABLE and node.source is not None and self._graph.variables[node.source].in_model
            return Content(samples=node.op == ARGUMENT, weights=is_weight, states=reads_state(self._graph, node))
        return Content(
            samples=True,
            weights=any(c.weights for c in given),
            gradients=node.backward or any(c.gradients for c in given),
            random=node.op in RANDOM_OPS or any(c.random for c in given),
            states=any(c.states for c in given),
        )
