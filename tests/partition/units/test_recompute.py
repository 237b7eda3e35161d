"""Which layers are made again together, which of their ops, and for what these wait."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.graph.op_kinds import SUM_OVER_REPLICAS
from smp_tf.partition.split.assign import assign
from smp_tf.partition.split.split import Split
from smp_tf.partition.split.splitter import split
from smp_tf.partition.units.cost import Costs, Flow, Stash, UnitCost, estimate
from smp_tf.partition.units.recompute import group_units, groups_of_nodes, needed_again, remade_nodes, with_recompute
from smp_tf.partition.units.units import build_units
from tests.partition.op_graph_builder import GraphBuilder, chain_of_dense

NOTHING = UnitCost()


def costs_of(passed: Sequence[float], kept: Sequence[float]) -> Costs:
    """A chain: unit i gives `passed[i]` bytes to the next one, and its backward reads `kept[i]` bytes of its own."""
    flows = tuple(Flow(unit, (unit + 1,), nbytes) for unit, nbytes in enumerate(passed[:-1]))
    stashes = tuple(Stash((unit,), nbytes, unit) for unit, nbytes in enumerate(kept))
    return Costs((NOTHING,) * len(kept), flows, stashes, ())


def needed(groups: Sequence[int], passed: Sequence[float], kept: Sequence[float], in_flight: float) -> float:
    """Bytes between groups of all microbatches, and within the largest of them."""
    between = sum(nbytes for (one, other), nbytes in zip(pairwise(groups), passed, strict=False) if one != other)
    within = [sum(n for g, n in zip(groups, kept, strict=True) if g == group) for group in set(groups)]
    return in_flight * between + max(within)


def test_groups_are_as_many_as_the_square_root_of_the_layers() -> None:
    """Chen et al.: n equal layers in sqrt(n) groups, where all that is kept of a layer is what it passes on."""
    assert group_units(costs_of([1.0] * 16, [1.0] * 16), 1.0) == (0,) * 4 + (1,) * 4 + (2,) * 4 + (3,) * 4


def test_a_cut_goes_where_little_passes() -> None:
    # A block keeps 10 in each of its layers and passes 1 on.
    assert group_units(costs_of([10, 10, 1, 10, 10, 1, 10, 10, 1], [10] * 9), 4.0) == (0, 0, 0, 1, 1, 1, 2, 2, 2)


def test_what_is_in_flight_counts() -> None:
    many, few = (group_units(costs_of([2.0] * 12, [3.0] * 12), in_flight) for in_flight in (16.0, 0.1))
    assert many == (0,) * 12
    assert few == tuple(range(12))


def test_no_unit_makes_no_group() -> None:
    assert group_units(Costs((), (), (), ()), 1.0) == ()


sizes = st.lists(st.integers(0, 9).map(float), min_size=1, max_size=7)


@settings(deadline=None)
@given(sizes, st.data(), st.sampled_from([0.5, 1.0, 4.0]))
def test_groups_are_near_the_best_of_all(kept: list[float], data: st.DataObject, in_flight: float) -> None:
    passed = data.draw(st.lists(st.integers(0, 9).map(float), min_size=len(kept), max_size=len(kept)))
    found = group_units(costs_of(passed, kept), in_flight)
    assert found[0] == 0
    assert all(later - group in (0, 1) for group, later in pairwise(found))
    best = min(
        needed([sum(ends[:unit]) for unit in range(len(kept))], passed, kept, in_flight)
        for ends in product((0, 1), repeat=len(kept) - 1)
    )
    # Bounds for the largest group are tried in steps.
    assert needed(found, passed, kept, in_flight) <= 1.25 * best + 1.0


def test_the_only_group_of_a_chunk_that_holds_one_microbatch_is_left_as_it_is() -> None:
    assert needed_again((0, 0, 1, 1, 1), (0, 0, 1, 1, 1), (2, 1)) == (0, 0, None, None, None)
    assert needed_again((0, 0, 0), (0, 0, 0), (1,)) == (None, None, None)
    assert needed_again((0, 0, 0), (0, 0, 0), (4,)) == (0, 0, 0)
    # What the last group keeps would be there while the others are made again.
    assert needed_again((0, 0, 1), (0, 0, 0), (1,)) == (0, 0, 1)


def cut(graph: OpGraph, groups: Sequence[int | None], chunks: Sequence[int] = (0,) * 5, **options: object) -> Split:
    """The units in groups, and on chunks."""
    units = build_units(graph)
    chunk_of = {number: chunks[unit.index] for unit in units for number in unit.nodes}
    assignment = assign(graph, 1 + max(chunks), chunk_of)
    return split(assignment, recompute=groups_of_nodes(units, groups), **options)


def named(graph: OpGraph, numbers: Sequence[int]) -> list[str]:
    return [graph.nodes[number].name for number in numbers]


def test_ops_of_a_group_that_its_backward_reads_are_made_again_and_wait_for_its_gradient() -> None:
    graph = chain_of_dense(4)
    units = build_units(graph)
    relus, whole = [graph.nodes[unit.nodes[-1]].name for unit in units[:4]], cut(graph, [None] * 5)
    halves = cut(graph, [0, 0, 1, 1, 1])
    assert named(graph, [t.node for t in whole.stash(0)]) == relus
    # What the second layer passes to the third is kept, and not made again for its own layer.
    assert named(graph, [t.node for t in halves.stash(0)]) == [relus[1]]
    backward = halves.segments[0, 1, 0]
    again = [n for n in backward.nodes if not graph.nodes[n].backward and graph.nodes[n].op in ("MatMul", "Relu")]
    assert [(graph.nodes[n].op, next(u.index for u in units if n in u.nodes)) for n in again] == [
        *(("MatMul", 0), ("Relu", 0)),
        *(("MatMul", 2), ("Relu", 2), ("MatMul", 3), ("Relu", 3)),
    ]
    # The first layer waits for the gradient that comes out of the third; the third begins at once.
    [(first, before)] = backward.after
    assert first == again[0]
    assert [graph.nodes[n].op for n in before] == ["MatMul"]
    assert set(before) <= set(units[2].backward)


def test_what_has_an_effect_is_not_made_again() -> None:
    b = GraphBuilder()
    x = b.argument((4, 8))
    call = b.call("net", class_name="Model")
    drawn = b.add("Print", x, call=call, shape=(4, 8), stateful=True)
    y = b.add("Relu", drawn, call=call, shape=(4, 8))
    gradient = b.add("ReluGrad", y, y, call=call, shape=(4, 8), backward=True)
    graph = b.graph(gradient)
    group_of = {tensor.node: 0 for tensor in (drawn, y, gradient)}
    assert remade_nodes(graph, group_of) == {y.node}


def test_a_sum_over_the_replicas_is_not_made_again() -> None:
    """The others would have to make it again at the same time."""
    b = GraphBuilder()
    x = b.argument((4, 8))
    call = b.call("net", class_name="Model")
    summed = b.add(SUM_OVER_REPLICAS, x, call=call, shape=(4, 8))
    y = b.add("Relu", summed, call=call, shape=(4, 8))
    gradient = b.add("ReluGrad", y, y, call=call, shape=(4, 8), backward=True)
    graph = b.graph(gradient)
    assert remade_nodes(graph, {tensor.node: 0 for tensor in (summed, y, gradient)}) == {y.node}


def test_control_edges_between_layers_make_no_cycle() -> None:
    """Bug: an op that was made again waited for a gradient that waited for it, by an edge of the user's own."""
    b = GraphBuilder()
    net = b.call("net", class_name="Model")
    x, layers_of, before = b.argument((4, 8)), [], ()
    for number in range(4):
        call = b.call(f"net/layer_{number}", net)
        linear = b.add("MatMul", x, b.read(b.variable(f"net/layer_{number}/kernel"), call), call=call, control=before)
        x = b.add("Tanh", linear, call=call)
        layers_of.append((linear, x))
        before = (linear.node,)
    gradient = b.add("OnesLike", x, backward=True)
    for linear, activation in reversed(layers_of):
        gradient = b.add("TanhGrad", activation, gradient, forward_of=activation)
        gradient = b.add("MatMul", gradient, linear, forward_of=linear)
    graph = b.graph(gradient)
    segment = cut(graph, [0, 1, 2, 3], (0,) * 4).segments[0, 1, 0]
    edges = nx.DiGraph((t.node, n) for n in segment.nodes for t in graph.nodes[n].inputs if t not in segment.inputs)
    edges.add_edges_from((c, n) for n in segment.nodes for c in graph.nodes[n].control if c in segment.nodes)
    edges.add_edges_from((before, number) for number, waits in segment.after for before in waits)
    assert nx.is_directed_acyclic_graph(edges)


def test_random_numbers_of_a_group_wait_with_it() -> None:
    """Bug: the masks of all layers' dropout were drawn when backward began."""
    b = GraphBuilder()
    net = b.call("net", class_name="Model")
    x, layers_of = b.argument((4, 8)), []
    for number in range(3):
        call = b.call(f"net/layer_{number}", net)
        x = b.add("MatMul", x, b.read(b.variable(f"net/layer_{number}/kernel"), call), call=call)
        mask = b.add("StatelessRandomUniformV2", b.add("Const", call=call), call=call)
        x = b.add("Mul", x, mask, call=call)
        layers_of.append((x, mask))
    gradient = b.add("OnesLike", x, backward=True)
    for masked, mask in reversed(layers_of):
        gradient = b.add("MulGrad", gradient, mask, masked, forward_of=masked)
    graph = b.graph(gradient)
    segment = cut(graph, [0, 1, 2], (0,) * 3).segments[0, 1, 0]
    waiting = {number for number, _ in segment.after}
    masks = [mask.node for _, mask in layers_of]
    assert [mask in waiting for mask in masks] == [True, True, False]


def test_what_a_sweep_after_backward_reads_is_not_made_again() -> None:
    graph = chain_of_dense(3)
    relus = [n for n, node in enumerate(graph.nodes) if node.op == "Relu"]
    group_of = groups_of_nodes(build_units(graph), [0, 0, 0, 0])
    assert set(relus) <= remade_nodes(graph, group_of)
    assert not remade_nodes(graph, group_of, kept=relus).intersection(relus)


def test_the_second_part_of_backward_reads_what_the_first_has_made_again() -> None:
    graph = chain_of_dense(4)
    done = cut(graph, [0, 0, 0, 0, 0], (0, 0, 1, 1, 1), cut_backward=[1])
    first, second = done.segments[1, 1, 0], done.segments[1, 1, 1]
    remade = {n for n in first.nodes if graph.nodes[n].op == "Relu"}
    assert len(remade) == 2
    assert {t.node for t in second.inputs} & remade
    assert not {n for n in second.nodes if graph.nodes[n].op == "Relu"} & remade


def test_the_costs_say_what_is_kept_and_that_backward_takes_longer() -> None:
    graph = chain_of_dense(4)
    units = build_units(graph)
    plain = estimate(graph, units)
    again = with_recompute(plain, graph, units, [0, 0, 1, 1, None])
    for unit, (before, after) in enumerate(zip(plain.units, again.units, strict=True)):
        assert after.seconds.backward == pytest.approx(before.seconds.backward + after.seconds.remade)
        assert after.seconds.forward == before.seconds.forward
        assert after.weight_gradient_seconds == pytest.approx(before.weight_gradient_seconds)
        # What the second layer makes is kept for the third.
        assert (after.seconds.remade > 0) == (unit in (0, 2, 3))
    assert again.groups == (0, 0, 1, 1, None)
    # What the second layer passes to the third, and nothing else; the loss reads the fourth's shape alone.
    assert [stash.producer for stash in again.stashes if stash.nbytes] == [1]
    assert sum(cost.nbytes.stash for cost in again.units) < sum(cost.nbytes.stash for cost in plain.units)
