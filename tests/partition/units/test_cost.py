"""What units cost, and what flows between them."""

from __future__ import annotations

import pytest

from smp_tf.partition.units.cost import Flow, Machine, Stash, Weight, estimate, with_measured
from smp_tf.partition.units.units import build_units
from tests.partition.op_graph_builder import GraphBuilder, chain_of_dense

#: A second per operation, nothing else: times are operations.
COUNTING = Machine(flops=1.0, memory=1e30, link=1.0, op_seconds=0.0)


def test_a_chain_of_dense_layers() -> None:
    graph = chain_of_dense(2)  # batch 4, width 8
    costs = estimate(graph, build_units(graph), slots=2.0, microbatches=4, machine=COUNTING)
    product, relu, tensor, kernel = 2 * 4 * 8 * 8, 32, 128.0, 256.0
    first, second, loss = costs.units
    assert (first.flops.forward, first.flops.backward) == (product + relu, product + relu)
    # Behind the first layer no gradient to the input is made.
    assert (second.flops.forward, second.flops.backward) == (product + relu, 2 * product + relu)
    assert (first.seconds.forward, second.seconds.backward) == (product + relu, 2 * product + relu)
    assert (loss.flops.forward, loss.nbytes.weights, loss.nbytes.stash) == (32, 0, 0)
    # The first keeps its Relu (its input is an argument); the second that Relu too, and its own.
    assert costs.stashes == (Stash((0, 1), tensor, 0), Stash((1,), tensor, 1))
    assert [u.nbytes.stash for u in costs.units] == [tensor, 2 * tensor, 0.0]
    assert costs.flows == (
        Flow(0, (1,), tensor),
        Flow(1, (2,), tensor),
        Flow(1, (0,), tensor, backward=True),
    )
    assert costs.weights == (
        Weight(0, (0,), kernel, kernel, 2 * kernel),
        Weight(1, (1,), kernel, kernel, 2 * kernel),
    )
    assert (first.nbytes.weights, first.nbytes.slots) == (kernel, 2 * kernel)
    assert costs.defaulted == ()


def test_time_is_the_larger_of_compute_and_memory() -> None:
    graph = chain_of_dense(1)
    units = build_units(graph)
    bound = estimate(graph, units, machine=Machine(flops=1e30, memory=1.0, link=1.0, op_seconds=0.0))
    # MatMul reads 128 and 256 bytes and writes 128; Relu reads and writes 128.
    assert bound.units[0].seconds.forward == pytest.approx(512 + 256)


def test_unsent_are_constants_functions_of_arguments_and_of_weights() -> None:
    b = GraphBuilder()
    x = b.argument()
    handle = b.variable("w")
    net = b.call("net")
    first, second = b.call("net/a", net), b.call("net/b", net)
    mask = b.add("Cast", x, call=first)
    scale = b.add("Const", call=first)
    weight = b.add("Cast", b.read(handle, first), call=first, shape=(8, 8))
    y = b.add("MatMul", x, weight, call=first)
    z = b.add("AddV2", y, mask, call=second)
    z = b.add("Mul", z, scale, call=second)
    z = b.add("MatMul", z, weight, call=second)
    graph = b.graph(z)
    costs = estimate(graph, build_units(graph))
    assert costs.flows == (Flow(0, (1,), 128.0),)
    assert costs.weights[0].users == (0, 1)


def test_gradients_of_a_shared_weight_cross_with_the_weight_and_not_with_the_microbatch() -> None:
    b = GraphBuilder()
    x = b.argument()
    handle = b.variable("w")
    net = b.call("net")
    first, second = b.call("net/a", net), b.call("net/b", net)
    y = b.add("MatMul", x, b.read(handle, first), call=first)
    z = b.add("MatMul", y, b.read(handle, second), call=second)
    one = b.add("MatMul", y, z, shape=(8, 8), forward_of=z)
    two = b.add("MatMul", x, z, shape=(8, 8), forward_of=y)
    total = b.add("AddN", one, two, shape=(8, 8), backward=True)
    b.gradient(handle, total)
    graph = b.graph()
    costs = estimate(graph, build_units(graph))
    assert all(flow.nbytes != 256.0 for flow in costs.flows)
    assert costs.weights == (Weight(0, (0, 1), 256.0, 256.0, 0.0),)


def test_a_sparse_gradient_takes_what_its_slices_take_and_never_more_than_the_whole() -> None:
    b = GraphBuilder()
    ids = b.argument((4,), "int64")
    handle = b.variable("table", (100, 8))
    net = b.call("net")
    rows = b.add("ResourceGather", handle, ids, call=net, reads=(0,))
    values = b.add("Reshape", rows, forward_of=rows)
    indices = b.add("Reshape", ids, shape=(4,), dtype="int64", forward_of=rows)
    b.gradient(handle, values, indices)
    graph = b.graph()
    units = build_units(graph)
    slices = 4 * 8 * 4 + 4 * 8
    assert estimate(graph, units, microbatches=3).weights[0].gradient == 3 * slices
    assert estimate(graph, units, microbatches=1000).weights[0].gradient == 100 * 8 * 4


def test_a_frozen_weight_has_neither_gradient_nor_slots() -> None:
    b = GraphBuilder()
    net = b.call("net")
    b.dense(b.argument(), b.variable("w"), net)
    graph = b.graph()
    assert estimate(graph, build_units(graph), slots=2.0).weights == (Weight(0, (0,), 256.0, 0.0, 0.0),)


def test_slots_can_be_given_by_variable() -> None:
    graph = chain_of_dense(2)
    costs = estimate(graph, build_units(graph), slots={1: 3.0})
    assert [w.slots for w in costs.weights] == [0.0, 3 * 256.0]


def test_unknown_op_types_are_said() -> None:
    b = GraphBuilder()
    net = b.call("net")
    b.add("Frobnicate", b.argument(), call=net)
    b.add("Unrelated", b.argument())
    graph = b.graph()
    assert estimate(graph, build_units(graph)).defaulted == ("Frobnicate",)


def test_measured_times_take_the_place_of_estimates_and_give_the_others_their_scale() -> None:
    graph = chain_of_dense(2)
    units = build_units(graph)
    costs = estimate(graph, units, machine=COUNTING)
    first, second, after = costs.units
    forward, backward = 3 * second.seconds.forward, second.seconds.backward
    scale = (forward + backward) / second.seconds.both
    measured, known = with_measured(costs, units, {units[1].name: (forward, backward), "another model/dense": (9, 9)})
    assert known == 1
    assert (measured.units[1].seconds.forward, measured.units[1].seconds.backward) == (forward, backward)
    assert measured.units[0].seconds.forward == pytest.approx(first.seconds.forward * scale)
    assert measured.units[2].seconds.forward == pytest.approx(after.seconds.forward * scale)
    assert (measured.flows, measured.weights) == (costs.flows, costs.weights)


def test_without_measured_times_of_these_units_the_costs_stay_as_they_are() -> None:
    graph = chain_of_dense(2)
    units = build_units(graph)
    costs = estimate(graph, units, machine=COUNTING)
    assert with_measured(costs, units, {"another model/dense": (9, 9)}) == (costs, 0)
