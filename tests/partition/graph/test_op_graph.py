"""The op graph as data: sizes, readers, ancestors, parts of it, the rules it keeps, and its text."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from smp_tf.partition.errors import GraphError
from smp_tf.partition.graph.op_graph import Gradient, Node, OpGraph, Tensor, TensorType
from tests.partition.op_graph_builder import GraphBuilder, chain_of_dense


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [
        ("float32", (), 4),
        ("float32", (4, 8), 128),
        ("float64", (3,), 24),
        ("int64", (2,), 16),
        ("bool", (5,), 5),
        ("bfloat16", (5,), 10),
        ("half", (5,), 10),
        ("complex64", (2,), 16),
        ("complex128", (2,), 32),
        ("float8_e4m3b11fnuz", (5,), 5),
        ("qint32", (5,), 20),
        ("quint8", (5,), 5),
        # In a tensor they have a byte each.
        ("int4", (5,), 5),
        ("float32", (0, 8), 0),
        ("resource", (), 0),
        ("variant", (7,), 0),
        ("string", (7,), 0),
    ],
)
def test_bytes_of_a_tensor(dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
    assert TensorType(dtype, shape).nbytes() == nbytes


def test_unknown_dimensions_count_as_the_caller_says() -> None:
    assert TensorType("float32", (None, 8)).nbytes() == 32
    assert TensorType("float32", (None, 8)).nbytes(unknown=10) == 320
    assert TensorType("float32", (None, None)).nbytes(unknown=3) == 36
    assert TensorType("float32", None).nbytes(unknown=10) == 40


def test_a_type_is_static_when_every_dimension_is_known() -> None:
    assert TensorType("float32", (4, 8)).is_static
    assert TensorType("float32", ()).is_static
    assert not TensorType("float32", (None, 8)).is_static
    assert not TensorType("float32", None).is_static


def diamond() -> OpGraph:
    """One op read by two, which a third joins; one read twice by one op."""
    b = GraphBuilder()
    x = b.argument()
    left = b.add("Relu", x)
    right = b.add("Tanh", x, control=(left.node,))
    both = b.add("AddV2", left, right)
    return b.graph(b.add("Mul", both, both, shape=(2,)))


def test_types_and_readers_and_numbers() -> None:
    graph = diamond()
    assert graph.type_of(Tensor(4, 0)) == TensorType("float32", (2,))
    assert graph.consumers == {
        Tensor(0, 0): (1, 2),
        Tensor(1, 0): (3,),
        Tensor(2, 0): (3,),
        Tensor(3, 0): (4,),
    }
    assert graph.number_of == {"SmpArgument_0": 0, "Relu_1": 1, "Tanh_2": 2, "AddV2_3": 3, "Mul_4": 4}


def test_ancestors_go_through_data_and_control_edges() -> None:
    graph = diamond()
    assert graph.ancestors([2]) == {0, 1, 2}  # 1 only by control
    assert graph.ancestors([1]) == {0, 1}
    assert graph.ancestors([4, 1]) == {0, 1, 2, 3, 4}
    assert graph.ancestors([]) == set()


def test_a_subgraph_is_renumbered_and_loses_control_edges_from_outside() -> None:
    b = GraphBuilder()
    x = b.argument()
    unread = b.add("Print", x, stateful=True)
    y = b.add("Relu", x, control=(unread.node,))
    z = b.add("Tanh", y, control=(y.node, unread.node))
    back = b.add("TanhGrad", z, forward_of=z)
    w = b.variable("w")
    b.gradient(w, back)
    part = b.graph(z).subgraph([4, 0, 2, 3, 5])
    assert [(n.name, n.inputs, n.control, n.forward_of) for n in part.nodes] == [
        ("SmpArgument_0", (), (), None),
        ("Relu_2", (Tensor(0, 0),), (), None),
        ("Tanh_3", (Tensor(1, 0),), (1,), None),
        ("TanhGrad_4", (Tensor(2, 0),), (), 2),
        ("SmpVariable_5", (), (), None),
    ]
    assert part.outputs == (Tensor(2, 0),)
    assert part.gradients == (Gradient(0, (Tensor(3, 0),)),)
    part.validate()


def test_a_subgraph_without_a_gradient_forgets_it_and_without_the_forward_op_its_name() -> None:
    graph = chain_of_dense(1)
    names = [node.name for node in graph.nodes]
    assert names == [
        "SmpArgument_0", "SmpVariable_1", "ReadVariableOp_2", "MatMul_3", "Relu_4", "Mean_5", "Fill_6", "ReluGrad_7",
        "MatMul_8",
    ]  # fmt: skip
    assert graph.subgraph(range(8)).gradients == ()
    only_fill = dataclasses.replace(graph, outputs=(Tensor(6, 0),)).subgraph([6])
    assert (only_fill.nodes[0].name, only_fill.nodes[0].forward_of) == ("Fill_6", None)


def test_a_subgraph_must_hold_what_it_reads_and_gives() -> None:
    with pytest.raises(GraphError, match=r"Dropping node 'Relu_1' would lose a tensor that is needed"):
        diamond().subgraph([0, 2, 3, 4])
    with pytest.raises(GraphError, match=r"Dropping node 'Mul_4' would lose"):
        diamond().subgraph([0, 1, 2, 3])


def broken(number: int, **changes: Any) -> OpGraph:
    graph = diamond()
    nodes = list(graph.nodes)
    nodes[number] = dataclasses.replace(nodes[number], **changes)
    return dataclasses.replace(graph, nodes=tuple(nodes))


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        (broken(2, name="Relu_1"), "Two nodes have the name 'Relu_1'"),
        (broken(1, inputs=(Tensor(3, 0),)), "'Relu_1' takes an input from node 3, which is not before it"),
        (broken(1, inputs=(Tensor(1, 0),)), "'Relu_1' takes an input from node 1, which is not before it"),
        (broken(1, inputs=(Tensor(-1, 0),)), "'Relu_1' takes an input from node -1"),
        (broken(1, inputs=(Tensor(0, 1),)), "'Relu_1' takes output 1 of 'SmpArgument_0', which has 1"),
        (broken(2, control=(2,)), "'Tanh_2' waits for node 2, which is not before it"),
        (broken(2, control=(-1,)), "'Tanh_2' waits for node -1"),
        (broken(3, call=1), "'AddV2_3' names call 1; there are 1"),
        (broken(3, reads=(0,)), "'AddV2_3' names variable 0; there are 0"),
        (broken(3, writes=(0,)), "'AddV2_3' names variable 0; there are 0"),
        (dataclasses.replace(diamond(), outputs=(Tensor(5, 0),)), "output names node 5; there are 5"),
        (dataclasses.replace(diamond(), gradients=(Gradient(0, (Tensor(9, 0),)),)), "output names node 9"),
    ],
)
def test_a_graph_that_breaks_a_rule_is_refused(graph: OpGraph, said: str) -> None:
    with pytest.raises(GraphError, match=said):
        graph.validate()


def test_a_graph_that_keeps_the_rules_passes() -> None:
    diamond().validate()
    chain_of_dense(3).validate()


def test_the_text_shows_every_node_with_its_edges_types_layer_and_marks() -> None:
    b = GraphBuilder()
    x = b.argument()
    call = b.call("net/dense")
    shown = b.add("Print", x, call=call, stateful=True, outputs=())
    y = b.add("Unique", x, call=call, control=(shown.node,), shape=None)
    b.add("Fill", shape=(None, 2), forward_of=y)
    b.nodes.append(Node("pair", "Split", (y,), (), (TensorType("bool", ()), TensorType("int32", (3,)))))
    assert b.graph(y).text() == (
        "0 SmpArgument() -> float32[4, 8]  # SmpArgument_0 []\n"
        "1 Print(0:0) ->   # Print_1 [net/dense] stateful\n"
        "2 Unique(0:0) ^1 -> float32?  # Unique_2 [net/dense]\n"
        "3 Fill() -> float32[None, 2]  # Fill_3 [net/dense] backward\n"
        "4 Split(2:0) -> bool[], int32[3]  # pair []\n"
    )
