"""What a layer computes of all samples for itself alone, such as a metric, is no row of its samples."""

from __future__ import annotations

from smp_tf.partition.graph.op_graph import OpGraph, Tensor
from smp_tf.partition.samples.batch_tail import find_tail
from smp_tf.partition.samples.sample_rows import SampleRows
from tests.partition.op_graph_builder import GraphBuilder


def layer(n: int) -> tuple[OpGraph, Tensor, Tensor]:
    """A layer that normalises its input and also adds the variance of its input; the variance, and the output."""
    builder = GraphBuilder()
    x, kernel = builder.argument((n, 4)), builder.variable("net/kernel", (4, 3))
    dense, norm = builder.call("net/dense"), builder.call("net/norm")
    hidden = builder.add("MatMul", x, builder.read(kernel, dense), call=dense, shape=(n, 3))
    mean = builder.add("Mean", hidden, call=norm, shape=(1, 3))
    away = builder.add("Sub", hidden, mean, call=norm, shape=(n, 3))
    square = builder.add("Square", away, call=norm, shape=(n, 3))
    variance = builder.add("Mean", square, call=norm, shape=())
    normal = builder.add("Mul", away, builder.add("Rsqrt", variance, call=norm, shape=()), call=norm, shape=(n, 3))
    loss = builder.add("Sum", normal, shape=())
    return builder.graph(variance, loss), variance, normal


def test_a_statistic_that_a_layer_adds_is_computed_of_what_the_layer_before_gives() -> None:
    (whole, variance, normal), (part, _, _) = layer(8), layer(2)
    rows = SampleRows(whole, part, 8)
    tail = find_tail(whole, rows, {"variance": (variance,)})
    assert [whole.nodes[cut.whole.node].op for cut in tail.cuts] == ["MatMul"]
    assert [whole.nodes[number].op for number in tail.nodes] == ["Mean", "Sub", "Square", "Mean"]
    # Its output is what microbatches see, as that of any layer.
    assert rows.of(normal).rows == 0
