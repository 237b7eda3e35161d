"""What is computed of gradients runs where they are; what needs those of several stages is told to all before."""

from __future__ import annotations

import pytest

from smp_tf.partition.graph.op_graph import OpGraph, Tensor
from smp_tf.partition.samples.batch_tail import Tail
from smp_tf.partition.samples.tail_places import TailPlaces, UntoldError, place_tail, require_told
from tests.partition.op_graph_builder import GraphBuilder


def placed(graph: OpGraph, stage_of: dict[Tensor, int | None], wanted: dict[Tensor, int | None]) -> TailPlaces:
    numbers = tuple(n for n in range(len(graph.nodes)) if Tensor(n, 0) not in stage_of)
    return place_tail(graph, Tail(numbers, (), (), {}, {}, {}), stage_of, wanted)


def described(graph: OpGraph, places: TailPlaces) -> tuple[list[str], list[list[str]]]:
    """Where each node runs, as "op @ stage, round", and what is told in each round."""
    ran = [
        f"{graph.nodes[number].op} @ {'all' if place.stage is None else place.stage}, {place.round}"
        for number, place in places.nodes.items()
    ]
    return ran, [[graph.nodes[tensor.node].name for tensor in told] for told in places.told]


def test_a_norm_is_told_in_one_round_and_scales_gradients_where_they_are() -> None:
    builder = GraphBuilder()
    first, second = builder.add("Placeholder"), builder.add("Placeholder")
    squares = [builder.add("L2Loss", gradient, shape=()) for gradient in (first, second)]
    norm = builder.add("AddN", *squares, shape=())
    scaled = [builder.add("Mul", gradient, norm) for gradient in (first, second)]
    graph = builder.graph(norm, *scaled)
    places = placed(graph, {first: 0, second: 1}, {norm: None, scaled[0]: 0, scaled[1]: 1})
    assert described(graph, places) == (
        ["L2Loss @ 0, 0", "L2Loss @ 1, 0", "AddN @ all, 1", "Mul @ 0, 1", "Mul @ 1, 1"],
        [["L2Loss_2", "L2Loss_3"]],
    )


def test_what_needs_what_was_told_is_told_in_the_next_round() -> None:
    builder = GraphBuilder()
    first, second = builder.add("Placeholder"), builder.add("Placeholder")
    norm = builder.add("AddN", *(builder.add("L2Loss", g, shape=()) for g in (first, second)), shape=())
    scaled = [builder.add("Mul", gradient, norm) for gradient in (first, second)]
    largest = builder.add("Maximum", *(builder.add("Max", g, shape=()) for g in scaled), shape=())
    graph = builder.graph(largest)
    _, told = described(graph, placed(graph, {first: 0, second: 1}, {largest: None}))
    assert told == [["L2Loss_2", "L2Loss_3"], ["Max_7", "Max_8"]]


def test_a_log_of_one_stage_is_told_and_a_gradient_is_not() -> None:
    builder = GraphBuilder()
    gradient = builder.add("Placeholder")
    clipped = builder.add("ClipByValue", gradient)
    largest = builder.add("Max", clipped, shape=())
    graph = builder.graph(clipped, largest)
    places = placed(graph, {gradient: 2}, {clipped: 2, largest: None})
    assert described(graph, places) == (["ClipByValue @ 2, 0", "Max @ 2, 0"], [["Max_2"]])


def test_a_state_of_the_script_is_written_on_every_stage_and_read_after_that() -> None:
    builder = GraphBuilder()
    gradient, average = builder.add("Placeholder"), builder.variable("average", (), in_model=False, read_only=False)
    norm = builder.add("L2Loss", gradient, shape=())
    builder.write(average, norm)
    written = len(builder.nodes) - 1
    read = builder.add("ReadVariableOp", average, shape=(), control=(written,), reads=(0,))
    clipped = builder.add("Mul", gradient, read)
    graph = builder.graph(clipped)
    places = placed(graph, {gradient: 1}, {clipped: 1})
    assert described(graph, places) == (
        ["SmpVariable @ all, 0", "L2Loss @ 1, 0", "AssignVariableOp @ all, 1", "ReadVariableOp @ all, 1", "Mul @ 1, 1"],
        [["L2Loss_2"]],
    )


def test_what_all_stages_have_is_computed_by_all_and_never_told() -> None:
    builder = GraphBuilder()
    shared = builder.add("Placeholder")
    norm = builder.add("L2Loss", shared, shape=())
    graph = builder.graph(norm)
    assert described(graph, placed(graph, {shared: None}, {norm: None})) == (["L2Loss @ all, 0"], [])


@pytest.mark.parametrize(("shape", "dtype"), [((None,), "float32"), ((2,), "string"), ((2,), "complex64")])
def test_what_cannot_be_told_is_named(shape: tuple[int | None, ...], dtype: str) -> None:
    builder = GraphBuilder()
    gradients = builder.add("Placeholder"), builder.add("Placeholder")
    parts = [builder.add("Where", gradient, shape=shape, dtype=dtype) for gradient in gradients]
    graph = builder.graph(builder.add("ConcatV2", *parts, shape=(None,), dtype=dtype))
    apart, together = (placed(graph, {gradients[0]: 0, gradients[1]: n}, {graph.outputs[0]: 0}) for n in (1, 0))
    with pytest.raises(UntoldError, match="'Where_2' is needed on several stages"):
        require_told(graph, apart)
    require_told(graph, together)
