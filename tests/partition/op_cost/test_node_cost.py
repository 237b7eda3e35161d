"""What single ops cost."""

from __future__ import annotations

import pytest

from smp_tf.partition.graph.op_graph import Node, TensorType
from smp_tf.partition.op_cost.node_cost import NodeCost, op_cost


def f32(*shape: int | None) -> TensorType:
    return TensorType("float32", shape)


def cost(op: str, inputs: list[TensorType], *outputs: TensorType, definition: bytes = b"") -> NodeCost:
    return op_cost(Node("n", op, (), (), outputs, definition), inputs, outputs)


@pytest.mark.parametrize(
    ("op", "inputs", "output", "flops"),
    [
        ("MatMul", [f32(4, 8), f32(8, 16)], f32(4, 16), 2 * 4 * 8 * 16),
        # Transposed: the gradient with respect to the weight.
        ("MatMul", [f32(4, 8), f32(4, 16)], f32(8, 16), 2 * 4 * 8 * 16),
        ("MatMul", [f32(4, 16), f32(8, 16)], f32(4, 8), 2 * 4 * 8 * 16),
        ("BatchMatMulV2", [f32(3, 2, 4, 8), f32(3, 2, 8, 5)], f32(3, 2, 4, 5), 2 * 6 * 4 * 8 * 5),
        ("BatchMatMulV2", [f32(3, 4, 8), f32(8, 5)], f32(3, 4, 5), 2 * 3 * 4 * 8 * 5),
        ("Conv2D", [f32(2, 9, 9, 3), f32(5, 5, 3, 7)], f32(2, 6, 6, 7), 2 * 2 * 36 * 7 * 75),
        (
            "DepthwiseConv2dNative",
            [f32(2, 9, 9, 3), f32(5, 5, 3, 2)],
            f32(2, 6, 6, 6),
            2 * 2 * 36 * 6 * 25,
        ),
        ("Relu", [f32(4, 8)], f32(4, 8), 32),
        ("Tanh", [f32(4, 8)], f32(4, 8), 320),
        ("Sum", [f32(4, 8)], f32(4), 32),
        ("AddN", [f32(4, 8)] * 3, f32(4, 8), 64),
        ("Transpose", [f32(4, 8)], f32(8, 4), 0),
        ("Reshape", [f32(4, 8)], f32(32), 0),
    ],
)
def test_operations(op: str, inputs: list[TensorType], output: TensorType, flops: float) -> None:
    assert cost(op, inputs, output).flops == flops


def test_the_gradients_of_a_convolution_cost_what_it_costs() -> None:
    x, kernel, y, sizes = (
        f32(2, 9, 9, 3),
        f32(5, 5, 3, 7),
        f32(2, 6, 6, 7),
        TensorType("int32", (4,)),
    )
    forward = cost("Conv2D", [x, kernel], y).flops
    assert cost("Conv2DBackpropInput", [sizes, kernel, y], x).flops == forward
    assert cost("Conv2DBackpropFilter", [x, sizes, y], kernel).flops == forward


def test_bytes_are_read_and_written() -> None:
    assert cost("Relu", [f32(4, 8)], f32(4, 8)).moved == 2 * 128
    assert cost("AddV2", [f32(4, 8), f32(8)], f32(4, 8)).moved == 128 + 32 + 128


def test_a_lookup_moves_its_rows_and_not_the_table() -> None:
    handle, ids = TensorType("resource", ()), TensorType("int32", (4,))
    assert cost("ResourceGather", [handle, ids], f32(4, 8)) == NodeCost(0.0, 128, 128)
    assert cost("GatherV2", [f32(100000, 8), ids], f32(4, 8)) == NodeCost(0.0, 128, 128)


def test_names_and_shapes_are_free() -> None:
    for op in ("Const", "Identity", "Reshape", "Shape", "ReadVariableOp", "NoOp"):
        assert cost(op, [f32(4, 8)], f32(4, 8)) == NodeCost(0.0, 0.0, 0.0)


def test_an_unknown_op_counts_as_elementwise_and_is_named() -> None:
    assert cost("Frobnicate", [f32(4, 8)], f32(4, 8)) == NodeCost(32, 128, 128, frozenset({"Frobnicate"}))


def test_unknown_dimensions_count_as_told() -> None:
    node = Node("n", "Relu", (), (), (f32(None, 8),))
    assert op_cost(node, [f32(None, 8)], [f32(None, 8)], unknown=10).flops == 80


@pytest.mark.parametrize(
    ("equation", "inputs", "output", "flops"),
    [
        ("abc,cde->abde", [f32(2, 3, 4), f32(4, 5, 6)], f32(2, 3, 5, 6), 2 * 2 * 3 * 4 * 5 * 6),
        ("...i,ij->...j", [f32(2, 3, 4), f32(4, 5)], f32(2, 3, 5), 2 * 2 * 3 * 4 * 5),
        ("ab->ba", [f32(2, 3)], f32(3, 2), 6),
    ],
)
def test_einsum(equation: str, inputs: list[TensorType], output: TensorType, flops: float) -> None:
    node_def_pb2 = pytest.importorskip("tensorflow.core.framework.node_def_pb2")
    definition = node_def_pb2.NodeDef(name="e", op="Einsum")
    definition.attr["equation"].s = equation.encode()
    assert cost("Einsum", inputs, output, definition=definition.SerializeToString()).flops == flops


def test_pooling_looks_at_its_window() -> None:
    node_def_pb2 = pytest.importorskip("tensorflow.core.framework.node_def_pb2")
    definition = node_def_pb2.NodeDef(name="p", op="MaxPool")
    definition.attr["ksize"].list.i.extend([1, 3, 3, 1])
    pooled = cost("MaxPool", [f32(1, 9, 9, 2)], f32(1, 3, 3, 2), definition=definition.SerializeToString())
    assert pooled.flops == 9 * 18
