"""The op graph of two linear layers, whose gradients need nothing of their forward passes."""

from __future__ import annotations

from smp_tf.partition.graph.op_graph import OpGraph
from tests.partition.op_graph_builder import GraphBuilder


def linear_layers(*, loss: bool = False) -> OpGraph:
    """Two layers without bias or activation, the gradient of the second one's weight, and perhaps the loss."""
    b = GraphBuilder()
    x = b.argument()
    net = b.call("net", class_name="Model")
    calls = [b.call(f"net/dense_{n}", net, class_name="Dense") for n in range(2)]
    handles = [b.variable(f"net/dense_{n}/kernel") for n in range(2)]
    hidden = b.add("MatMul", x, b.read(handles[0], calls[0]), call=calls[0])
    output = b.add("MatMul", hidden, b.read(handles[1], calls[1]), call=calls[1])
    total = b.add("Sum", output, shape=())
    ones = b.add("Fill", forward_of=total)
    gradient = b.add("MatMul", hidden, ones, shape=(8, 8), forward_of=output)
    b.gradient(handles[1], gradient)
    return b.graph(gradient, total) if loss else b.graph(gradient)
