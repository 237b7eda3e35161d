"""What a function says of a graph is found out once for each graph, and for each question."""

from __future__ import annotations

import dataclasses

from smp_tf.partition.graph.graph_facts import graph_fact
from smp_tf.partition.graph.op_graph import OpGraph, Tensor
from tests.partition.op_graph_builder import GraphBuilder

ASKED: list[tuple[int, str]] = []


@graph_fact
def _count(graph: OpGraph, op: str) -> int:
    ASKED.append((len(graph.nodes), op))
    return sum(node.op == op for node in graph.nodes)


def test_a_graph_is_asked_once_and_a_changed_one_anew() -> None:
    ASKED.clear()
    builder = GraphBuilder()
    x = builder.argument()
    builder.add("Mul", builder.add("Relu", x), builder.add("Relu", x))
    graph = builder.graph()

    assert [_count(graph, "Relu"), _count(graph, "Relu"), _count(graph, "Mul")] == [2, 2, 1]
    assert ASKED == [(4, "Relu"), (4, "Mul")]

    shorter = dataclasses.replace(graph, nodes=graph.nodes[:2], outputs=())
    assert [_count(shorter, "Relu"), _count(graph, "Relu")] == [1, 2]
    assert ASKED == [(4, "Relu"), (4, "Mul"), (2, "Relu")]


def test_facts_are_no_part_of_what_a_graph_is() -> None:
    builder = GraphBuilder()
    builder.add("Relu", builder.argument())
    graph, other = builder.graph(), builder.graph()
    _count(graph, "Relu")
    assert graph == other
    assert repr(graph) == repr(other)


def test_edges_can_be_asked_from_both_ends() -> None:
    builder = GraphBuilder()
    x = builder.argument()
    handle = builder.variable("w")
    y = builder.add("Mul", x, x, control=(handle.node,))
    builder.add("Add", y, builder.read(handle))
    graph = builder.graph()
    assert graph.data_from == ((), (), (0, 0), (1,), (2, 3))
    assert graph.data_to == ((2,), (3,), (4,), (4,), ())
    assert graph.unsendable == {Tensor(1, 0)}
