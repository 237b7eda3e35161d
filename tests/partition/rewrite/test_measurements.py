"""What a layer's call measures with a metric leaves the call; what the model goes on with stays."""

from __future__ import annotations

import pytest

from smp_tf.partition.errors import PlacementError
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.rewrite.measurements import leave_the_model
from smp_tf.pipeline.planner.cut import cut
from smp_tf.pipeline.planner.proposal import propose
from smp_tf.pipeline.planner.request import Aim, Course, PlacementRequest, Storage
from tests.partition.op_graph_builder import GraphBuilder


def measured(goes_on: bool = False, in_model: bool = False, backward: bool = False) -> OpGraph:
    """Two dense layers; the first adds its output's mean to a metric, whose value the second may use."""
    b = GraphBuilder()
    model = b.call("net")
    first, second = b.call("net/first", model), b.call("net/second", model)
    weights = [b.variable("first/kernel"), b.variable("second/kernel")]
    total = b.variable("total", (), in_model=in_model, read_only=False)
    x = b.dense(b.argument(), weights[0], first)
    mean = b.add("Mean", x, call=first, shape=())
    b.write(total, b.add("AddV2", b.read(total, first), mean, call=first, shape=()), first)
    result = b.read(total, first)
    if goes_on:
        x = b.add("Mul", x, b.add("MatMul", result, b.read(weights[0], first), call=first), call=first)
    y = b.dense(x, weights[1], second)
    if backward:
        b.add("MulGrad", result, backward=True)
    return b.graph(y, b.add("Identity", result, call=first, shape=()))


def calls(graph: OpGraph) -> dict[str, int]:
    return {node.name: node.call for node in graph.nodes}


def test_what_touches_the_metric_is_outside_and_what_it_measures_inside() -> None:
    graph = measured()
    before, after = calls(graph), calls(leave_the_model(graph))
    changed = sorted(name.rpartition("_")[0] for name in before if before[name] != after[name])
    assert changed == ["AddV2", "AssignVariableOp", "Identity", "ReadVariableOp", "ReadVariableOp"]
    assert all(after[name] == 0 for name in before if before[name] != after[name])
    assert {name for name in after if name.startswith("Mean")} == {"Mean_7"}
    assert after["Mean_7"] == before["Mean_7"] == 2


def test_then_it_can_be_placed() -> None:
    request = PlacementRequest(Course("simple", 2, 2), Storage(slots=0.0), Aim("memory"))
    assert list(propose(leave_the_model(measured()), request, {}).units.values()) == [0, 1]


@pytest.mark.parametrize("how", [{"goes_on": True}, {"in_model": True}, {"backward": True}])
def test_what_the_model_goes_on_with_stays(how: dict[str, bool]) -> None:
    graph = measured(**how)
    assert leave_the_model(graph) is graph


def test_a_model_without_measurements_is_left_alone() -> None:
    b = GraphBuilder()
    graph = b.graph(b.dense(b.argument(), b.variable("kernel"), b.call("net")))
    assert leave_the_model(graph) is graph


def test_the_model_cannot_go_on_with_a_metric() -> None:

    request = PlacementRequest(Course("simple", 2, 2), Storage(slots=0.0), Aim("memory"))
    graph = measured(goes_on=True)
    with pytest.raises(PlacementError, match="uses 'total', a variable of the script that the step assigns"):
        cut(graph, propose(graph, request, {}))
