"""What nothing needs is left out of a step."""

from __future__ import annotations

from smp_tf.partition.rewrite.prune import prune
from tests.partition.linear_layers import linear_layers
from tests.partition.op_graph_builder import GraphBuilder


def test_nothing_is_kept_for_a_weight_that_is_used_anyway() -> None:
    graph = linear_layers(loss=True)
    assert prune(graph).text() == graph.text()


def test_what_no_output_and_no_trained_weight_needs_is_left_out() -> None:
    b = GraphBuilder()
    x = b.argument()
    call = b.call("net", class_name="Model")
    handle = b.variable("net/kernel")
    wanted = b.dense(x, handle, call)
    unwanted = b.add("MatMul", wanted, b.read(handle, call), call=call)
    b.gradient(handle, b.add("MatMul", x, unwanted, shape=(8, 8), forward_of=unwanted))
    assert [node.op for node in prune(b.graph(wanted)).nodes] == [
        "SmpArgument",
        "SmpVariable",
        "ReadVariableOp",
        "MatMul",
        "Relu",
    ]
