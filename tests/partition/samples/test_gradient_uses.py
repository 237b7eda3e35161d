"""What is computed of gradients is told where the average of it is not what it gives for the average."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from smp_tf.partition.graph.op_graph import OpGraph, Tensor
from smp_tf.partition.samples.gradient_uses import NonlinearUse, nonlinear_uses, owner_of
from tests.partition.op_graph_builder import GraphBuilder

#: Given a builder, a gradient, the loss and a constant, makes what the step returns.
Use = Callable[[GraphBuilder, Tensor, Tensor, Tensor], Tensor]


def step(use: Use) -> OpGraph:
    builder = GraphBuilder()
    x, kernel = builder.argument(), builder.variable("net/kernel")
    call = builder.call("net")
    product = builder.add("MatMul", x, builder.read(kernel, call), call=call)
    loss = builder.add("Mean", product, shape=())
    gradient = builder.add("MatMul", x, product, forward_of=product, shape=(8, 8))
    builder.gradient(kernel, gradient)
    return builder.graph(use(builder, gradient, loss, builder.add("Const", shape=())))


@pytest.mark.parametrize(
    "use",
    [
        lambda b, g, loss, c: g,
        lambda b, g, loss, c: b.add("Mul", g, c),
        lambda b, g, loss, c: b.add("RealDiv", b.add("Neg", g), c),
        lambda b, g, loss, c: b.add("AddV2", g, b.add("Mul", c, b.read(Tensor(1, 0)))),
        lambda b, g, loss, c: b.add("Sub", g, b.add("Mean", g)),
        lambda b, g, loss, c: b.add("Fill", b.add("Shape", g), c),
        lambda b, g, loss, c: b.add("SelectV2", c, g, b.add("ZerosLike", g)),
        lambda b, g, loss, c: b.add("Square", loss),
    ],
    ids=["itself", "times", "over", "decayed", "centred", "its shape", "chosen by a constant", "of the loss"],
)
def test_what_is_linear_is_let_through(use: Use) -> None:
    assert nonlinear_uses(step(use)) == ()


@pytest.mark.parametrize(
    ("use", "kind"),
    [
        (lambda b, g, loss, c: b.add("L2Loss", g, shape=()), "L2Loss"),
        (lambda b, g, loss, c: b.add("Neg", b.add("Square", b.add("Mul", g, c))), "Square"),
        (lambda b, g, loss, c: b.add("Mul", g, loss), "Mul"),
        (lambda b, g, loss, c: b.add("Mul", g, g), "Mul"),
        (lambda b, g, loss, c: b.add("RealDiv", c, g), "RealDiv"),
        (lambda b, g, loss, c: b.add("SelectV2", b.add("Greater", g, c), g, g), "Greater"),
        (lambda b, g, loss, c: b.add("Minimum", g, c), "Minimum"),
        (lambda b, g, loss, c: b.add("PartitionedCall", g), "PartitionedCall"),
    ],
    ids=["norm", "later", "times the loss", "squared", "divided by", "chosen by itself", "clipped", "in a function"],
)
def test_what_is_not_is_told_where_it_begins(use: Use, kind: str) -> None:
    [found] = nonlinear_uses(step(use))
    assert (found.kind, found.position, found.variable) == (kind, 0, None)


def test_what_is_written_to_a_variable_of_the_script_is_looked_at_too() -> None:
    def use(builder: GraphBuilder, gradient: Tensor, loss: Tensor, constant: Tensor) -> Tensor:
        seen = builder.variable("seen", (), in_model=False)
        builder.write(seen, builder.add("L2Loss", gradient, shape=()))
        return loss

    graph = step(use)
    [found] = nonlinear_uses(graph)
    name = next(node.name for node in graph.nodes if node.op == "L2Loss")
    assert found == NonlinearUse(name, "L2Loss", None, "seen")


def test_what_backward_makes_of_a_gradient_for_other_weights_is_no_use_of_it() -> None:
    def use(builder: GraphBuilder, gradient: Tensor, loss: Tensor, constant: Tensor) -> Tensor:
        return builder.add("ReluGrad", gradient, gradient, forward_of=Tensor(3, 0))

    assert nonlinear_uses(step(use)) == ()


def test_a_changed_gradient_belongs_to_its_variable_and_a_norm_to_none() -> None:
    builder = GraphBuilder()
    x = builder.argument()
    gradients = [builder.add("MatMul", x, forward_of=x, shape=(8, 8)) for _ in range(2)]
    norm = builder.add("Add", *(builder.add("L2Loss", g, shape=()) for g in gradients), shape=())
    clipped = builder.add("Mul", gradients[0], builder.add("Rsqrt", norm, shape=()), shape=(8, 8))
    both = builder.add("Add", *gradients, shape=(8, 8))
    graph = builder.graph(clipped, both)
    owners = {tensor: owner_of(graph, tensor, gradients) for tensor in (gradients[1], clipped, norm, both)}
    assert owners == {gradients[1]: gradients[1], clipped: gradients[0], norm: None, both: None}
