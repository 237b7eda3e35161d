"""Where units go: solved at first, then where an earlier step put their variables."""

from __future__ import annotations

import dataclasses

import pytest

from smp_tf.partition.errors import PlacementError
from smp_tf.partition.op_graph import OpGraph
from smp_tf.planning import PlacementRequest, cut, cut_into_units, propose, prune
from tests.partition.op_graph_builder import GraphBuilder, chain_of_dense

TWO = PlacementRequest(stages=2, microbatches=2, schedule="simple", objective="memory", slots=0.0)


def test_the_first_step_leaves_no_stage_empty() -> None:
    plan = propose(chain_of_dense(4), TWO, {})
    assert list(plan.units.values()) == [0, 0, 1, 1]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_step_whose_variables_are_all_on_one_stage_stays_there(stage: int) -> None:
    graph = chain_of_dense(3)
    plan = propose(graph, TWO, dict.fromkeys(range(3), stage))
    assert set(plan.units.values()) == {stage}
    assert set(plan.owners.values()) == {stage}
    assert {of for of, _ in cut(graph, plan).segments} == {stage}


def test_units_follow_the_owners_of_an_earlier_step() -> None:
    plan = propose(chain_of_dense(4), TWO, {0: 0, 1: 1, 2: 1, 3: 1})
    assert list(plan.units.values()) == [0, 1, 1, 1]


def test_new_units_fill_the_stages_that_the_decided_ones_leave() -> None:
    plan = propose(chain_of_dense(4), TWO, {0: 0, 1: 0})
    assert list(plan.units.values()) == [0, 0, 1, 1]


def test_new_units_follow_their_neighbours_where_no_other_cut_is_left() -> None:
    plan = propose(chain_of_dense(3), TWO, {0: 1, 1: 1})
    assert list(plan.units.values()) == [1, 1, 1]


def test_owners_against_the_flow_of_data_are_an_error_that_names_the_earlier_step() -> None:
    words = (
        r"An earlier step put the variables of 'net/dense_0' on stage 1 and those of 'net/dense_1' on stage 0.*"
        r"Run the step that uses all of these layers first"
    )
    with pytest.raises(PlacementError, match=words):
        propose(chain_of_dense(2), TWO, {0: 1, 1: 0})


def test_measured_times_move_the_cut_and_are_said() -> None:
    graph = chain_of_dense(4)
    estimated = propose(graph, dataclasses.replace(TWO, objective="speed"), {})
    assert list(estimated.units.values()) == [0, 0, 1, 1]
    measured = {"net/dense_0": (0.9, 0.9), **{f"net/dense_{n}": (0.1, 0.1) for n in (1, 2, 3)}}
    plan = propose(graph, dataclasses.replace(TWO, objective="speed", measured=measured), {})
    assert list(plan.units.values()) == [0, 1, 1, 1]
    assert plan.reasons[-1] == "the times are measured ones, of 4 of the 4 units"
    assert not any("measured" in reason for reason in estimated.reasons)


def test_cut_into_units_every_unit_is_a_stage() -> None:
    units, done = cut_into_units(chain_of_dense(3))
    assert [unit.name for unit in units] == ["net/dense_0", "net/dense_1", "net/dense_2"]
    assert sorted(done.segments) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def by_hand(default: int = 0) -> PlacementRequest:
    return dataclasses.replace(TWO, default=default)


def test_by_hand_what_the_script_has_not_placed_is_on_the_default_partition() -> None:
    assert list(propose(chain_of_dense(4, stages=[None, 0, 1, 1]), by_hand(), {}).units.values()) == [0, 0, 1, 1]
    assert list(propose(chain_of_dense(4, stages=[0, None, None, None]), by_hand(1), {}).units.values()) == [0, 1, 1, 1]


def test_by_hand_a_partition_is_visited_once() -> None:
    words = (
        r"auto_partition is false, and 'net/dense_2' is outside any smp\.partition, and so on default_partition 0, "
        r"while what comes before it, 'net/dense_1', is on partition 1\..*cannot come back"
    )
    with pytest.raises(PlacementError, match=words):
        propose(chain_of_dense(3, stages=[0, 1, None]), by_hand(), {})


def test_by_hand_every_partition_has_a_layer() -> None:
    with pytest.raises(PlacementError, match=r"no layer is on partition 1 of 2\. Place one there with smp\.partition"):
        propose(chain_of_dense(3), by_hand(), {})


def test_with_one_partition_nothing_is_placed_by_hand() -> None:
    one = dataclasses.replace(by_hand(), stages=1)
    assert set(propose(chain_of_dense(3, stages=[0, 1, None]), one, {}).units.values()) == {0}


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


def test_a_weight_that_only_its_gradient_speaks_of_is_placed_where_the_layer_is() -> None:
    """Bug: the forward pass of a linear layer was pruned, and its weight given to stage 0, without a gradient there."""
    graph = prune(linear_layers())
    assert [graph.calls[node.call].path for node in graph.nodes if node.op == "MatMul" and not node.backward] == [
        "net/dense_0",
        "net/dense_1",
    ]
    plan = propose(graph, TWO, {})
    assert plan.owners == {"net/dense_0/kernel": 0, "net/dense_1/kernel": 1}
    assert [output.stage for output in cut(graph, plan).outputs] == [1]


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
