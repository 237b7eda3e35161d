"""Summands made on one stage are added there before they are sent."""

from __future__ import annotations

from collections.abc import Mapping

from tensorflow.core.framework import node_def_pb2

from smp_tf.partition.graph.op_graph import OpGraph, Tensor
from smp_tf.partition.split.assign import assign
from smp_tf.partition.split.sums import sum_before_sending
from tests.partition.op_graph_builder import GraphBuilder


def add_n(count: int) -> bytes:
    definition = node_def_pb2.NodeDef(name="AddN", op="AddN")
    definition.attr["N"].i = count
    return bytes(definition.SerializeToString())


def summed_on(stage: int, *summands: int) -> tuple[OpGraph, OpGraph]:
    """The graph with one AddN on a stage, of one backward product made on each of the given stages, and the result."""
    b = GraphBuilder()
    net = b.call("net")
    x = b.argument()
    stage_of: dict[int, int] = {}
    forward: dict[int, Tensor] = {}
    for at in range(3):
        forward[at] = b.add("MatMul", x, x, call=b.call(f"net/{at}", net))
        stage_of[forward[at].node] = at
    tensors = [b.add("Neg", forward[at], forward_of=forward[at]) for at in summands]
    total = b.add("AddN", *tensors, definition=add_n(len(tensors)), forward_of=forward[stage])
    graph = b.graph(b.add("Tanh", total, forward_of=forward[stage]))
    return graph, sum_before_sending(assign(graph, 3, stage_of))


def sums(graph: OpGraph) -> list[tuple[str, list[str], int]]:
    """Every AddN: name, names of its inputs, and the number of inputs its definition says."""
    found = []
    for node in graph.nodes:
        if node.op == "AddN":
            definition = node_def_pb2.NodeDef.FromString(node.definition)
            assert definition.name in (node.name, "AddN")
            found.append((node.name, [graph.nodes[t.node].name for t in node.inputs], definition.attr["N"].i))
    return found


def test_two_summands_of_a_later_stage_are_added_there() -> None:
    graph, changed = summed_on(0, 2, 2, 0)
    assert sums(graph) == [("AddN_7", ["Neg_4", "Neg_5", "Neg_6"], 3)]
    part = "AddN_7/sum_of_chunk_2"
    assert sums(changed) == [(part, ["Neg_4", "Neg_5"], 2), ("AddN_7", ["Neg_6", part], 2)]
    made = changed.nodes[changed.number_of[part]]
    assert (made.backward, made.forward_of, made.control) == (True, None, ())
    assert made.outputs == graph.nodes[7].outputs
    # What read the sum still reads it.
    assert [changed.nodes[t.node].name for t in changed.nodes[-1].inputs] == ["AddN_7"]
    # Nothing of the step's own is gone, and the added sum is placed where its summands are.
    assert {n.name for n in changed.nodes} - {n.name for n in graph.nodes} == {part}
    stage_of = {changed.number_of[f"MatMul_{n}"]: n - 1 for n in (1, 2, 3)}
    place = assign(changed, 3, stage_of).places[changed.number_of[part]]
    assert (place.chunk, place.sweep) == (2, 1)


def test_every_stage_adds_its_own() -> None:
    _, changed = summed_on(0, 1, 2, 1, 0, 2)
    assert sums(changed) == [
        ("AddN_9/sum_of_chunk_1", ["Neg_4", "Neg_6"], 2),
        ("AddN_9/sum_of_chunk_2", ["Neg_5", "Neg_8"], 2),
        ("AddN_9", ["Neg_7", "AddN_9/sum_of_chunk_1", "AddN_9/sum_of_chunk_2"], 3),
    ]


def test_two_stages_with_two_summands_each_and_none_at_home() -> None:
    _, changed = summed_on(0, 1, 2, 1, 2)
    assert sums(changed) == [
        ("AddN_8/sum_of_chunk_1", ["Neg_4", "Neg_6"], 2),
        ("AddN_8/sum_of_chunk_2", ["Neg_5", "Neg_7"], 2),
        ("AddN_8", ["AddN_8/sum_of_chunk_1", "AddN_8/sum_of_chunk_2"], 2),
    ]


def test_a_sum_of_which_all_is_made_on_one_other_stage_is_made_there() -> None:
    _, changed = summed_on(0, 2, 2)
    assert sums(changed) == [
        ("AddN_6/sum_of_chunk_2", ["Neg_4", "Neg_5"], 2),
        ("AddN_6", ["AddN_6/sum_of_chunk_2"], 1),
    ]


def test_nothing_changes_where_no_stage_sends_two() -> None:
    for summands in ([0, 0, 0], [1, 2, 0], [1], [2, 1]):
        graph, same = summed_on(0, *summands)
        assert same is graph


def test_summands_that_nobody_sends_are_left_alone() -> None:
    """Those of the sum's own stage; those that every stage can make."""
    graph, same = summed_on(1, 1, 1, 2)
    assert same is graph
    b = GraphBuilder()
    x = b.argument()
    y = b.add("MatMul", x, x, call=b.call("net"))
    free = [b.add("Neg", x), b.add("Abs", x)]
    b.add("AddN", y, *free, definition=add_n(3))
    graph = b.graph(y)
    assert sum_before_sending(assign(graph, 2, {y.node: 1})) is graph


def test_a_tensor_that_is_added_twice_counts_twice() -> None:
    """It is one message and two summands."""
    b = GraphBuilder()
    net = b.call("net")
    x = b.argument()
    calls = [b.call(f"net/{at}", net) for at in range(2)]
    first, last = (b.add("MatMul", x, x, call=call) for call in calls)
    late = b.add("Neg", last, forward_of=last)
    early = b.add("Neg", first, forward_of=first)
    total = b.add("AddN", late, early, late, definition=add_n(3), forward_of=first)
    graph = sum_before_sending(assign(b.graph(total), 2, stage_map(first, last)))
    assert sums(graph) == [
        ("AddN_5/sum_of_chunk_1", ["Neg_3", "Neg_3"], 2),
        ("AddN_5", ["Neg_4", "AddN_5/sum_of_chunk_1"], 2),
    ]


def stage_map(*tensors: Tensor) -> Mapping[int, int]:
    return {tensor.node: stage for stage, tensor in enumerate(tensors)}
