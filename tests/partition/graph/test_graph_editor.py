"""Copying a graph with nodes put in between."""

from __future__ import annotations

import dataclasses

import pytest

from smp_tf.partition.errors import GraphError
from smp_tf.partition.graph.graph_editor import GraphEditor
from smp_tf.partition.graph.op_graph import Gradient, Node, OpGraph, Tensor, TensorType
from tests.partition.op_graph_builder import GraphBuilder, chain_of_dense

FLOATS = TensorType("float32", (4, 8))


def waiting() -> OpGraph:
    """A chain with a control edge and a gradient."""
    b = GraphBuilder()
    x = b.argument()
    w = b.variable("w")
    y = b.add("Relu", x)
    z = b.add("Tanh", y, control=(y.node,))
    b.gradient(w, b.add("TanhGrad", z, forward_of=z))
    return b.graph(z, y)


@pytest.mark.parametrize("graph", [waiting(), chain_of_dense(3)])
def test_a_copy_without_changes_is_equal(graph: OpGraph) -> None:
    editor = GraphEditor(graph)
    for number in range(len(graph.nodes)):
        editor.keep(number, editor.moved_node(number))
    assert editor.finish() == graph


def test_a_node_in_between_moves_everything_after_it() -> None:
    editor = GraphEditor(waiting())
    for number in range(5):
        node = editor.moved_node(number)
        if node.op == "Tanh":
            added = editor.add(Node("between", "Neg", node.inputs, (), (FLOATS,)))
            assert added == Tensor(3, 0)
            node = dataclasses.replace(node, inputs=(added,))
        editor.keep(number, node)
    changed = editor.finish()
    assert [(n.name, n.inputs, n.control, n.forward_of) for n in changed.nodes] == [
        ("SmpArgument_0", (), (), None),
        ("SmpVariable_1", (), (), None),
        ("Relu_2", (Tensor(0, 0),), (), None),
        ("between", (Tensor(2, 0),), (), None),
        ("Tanh_3", (Tensor(3, 0),), (2,), None),
        ("TanhGrad_4", (Tensor(4, 0),), (), 4),
    ]
    assert changed.outputs == (Tensor(4, 0), Tensor(2, 0))
    assert changed.gradients == (Gradient(0, (Tensor(5, 0),)),)


def test_a_backward_op_may_come_before_the_forward_op_it_names() -> None:
    graph = waiting()
    nodes = list(graph.nodes)
    nodes[2] = dataclasses.replace(nodes[2], backward=True, forward_of=3)
    editor = GraphEditor(dataclasses.replace(graph, nodes=tuple(nodes)))
    editor.add(Node("first", "Const", (), (), (FLOATS,)))
    for number in range(5):
        editor.keep(number, editor.moved_node(number))
    assert [n.forward_of for n in editor.finish().nodes] == [None, None, None, 4, None, 4]


def test_an_added_node_that_names_a_forward_op_is_left_as_the_caller_made_it() -> None:
    """It refers to the new graph already."""
    editor = GraphEditor(waiting())
    editor.add(Node("zero", "Const", (), (), (FLOATS,)))
    for number in range(5):
        editor.keep(number, editor.moved_node(number))
    editor.add(Node("more", "Neg", (Tensor(3, 0),), (), (FLOATS,), backward=True, forward_of=3))
    assert editor.finish().nodes[-1].forward_of == 3


def test_the_library_is_kept_or_replaced() -> None:
    editor = GraphEditor(OpGraph((), (), (), (), library=b"old"))
    assert editor.finish().library == b"old"
    assert editor.finish(b"new").library == b"new"
    assert editor.finish(b"").library == b""


def test_a_copy_that_breaks_a_rule_is_refused() -> None:
    editor = GraphEditor(waiting())
    editor.add(Node("Relu_2", "Const", (), (), (FLOATS,)))
    for number in range(5):
        editor.keep(number, editor.moved_node(number))
    with pytest.raises(GraphError, match="Two nodes have the name 'Relu_2'"):
        editor.finish()
