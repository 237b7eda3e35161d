"""Grouping a step into units."""

from __future__ import annotations

import pytest

from smp_tf.partition.errors import PlacementError
from smp_tf.partition.graph.op_graph import OpGraph, TensorType
from smp_tf.partition.units.units import AFTER_MODEL, build_units, constants, ordered_by_chunk, weight_derived
from tests.partition.op_graph_builder import GraphBuilder, chain_of_dense


def text(graph: OpGraph) -> list[str]:
    """A unit a line: name, op types of its forward nodes, op types of its backward nodes."""
    return [
        f"{u.name}: {' '.join(graph.nodes[n].op for n in u.nodes)}"
        + ("" if not u.backward else " | " + " ".join(graph.nodes[n].op for n in u.backward))
        for u in build_units(graph)
    ]


def test_layers_become_units_and_the_loss_the_last() -> None:
    assert text(chain_of_dense(2)) == [
        "net/dense_0: ReadVariableOp MatMul Relu | ReluGrad MatMul",
        "net/dense_1: ReadVariableOp MatMul Relu | ReluGrad MatMul MatMul",
        # Fill is made of nothing but a constant: it belongs to no unit.
        "loss and outputs: Mean",
    ]


def test_units_know_their_variables() -> None:
    units = build_units(chain_of_dense(3))
    assert [u.variables for u in units] == [(0,), (1,), (2,), ()]
    assert [u.index for u in units] == [0, 1, 2, 3]


def test_a_model_of_raw_ops_is_split_at_its_products() -> None:
    b = GraphBuilder()
    x = b.argument()
    handles = [b.variable(f"w{i}") for i in range(3)]
    net = b.call("net")
    for handle in handles:
        x = b.dense(x, handle, net)
    graph = b.graph(x)
    assert text(graph) == [
        "net: ReadVariableOp MatMul Relu",
        "net #2: ReadVariableOp MatMul Relu",
        "net #3: ReadVariableOp MatMul Relu",
    ]
    assert [u.variables for u in build_units(graph)] == [(0,), (1,), (2,)]


def test_weights_read_at_the_top_join_their_readers() -> None:
    b = GraphBuilder()
    x = b.argument()
    handles = [b.variable(f"w{i}") for i in range(2)]
    net = b.call("net")
    weights = [b.read(h, net) for h in handles]
    for weight in weights:
        x = b.add("MatMul", x, weight, call=net)
    units = build_units(b.graph(x))
    assert [u.variables for u in units] == [(0,), (1,)]


def test_cheap_ops_part_where_the_fewest_bytes_cross() -> None:
    b = GraphBuilder()
    x = b.argument((4, 8))
    net = b.call("net")
    first, second = b.call("net/a", net), b.call("net/b", net)
    x = b.dense(x, b.variable("a"), first)
    x = b.add("Tile", x, call=net, shape=(4, 64))
    x = b.add("Exp", x, call=net, shape=(4, 64))
    x = b.add("Sum", x, call=net, shape=(4, 1))
    x = b.add("Pad", x, call=net, shape=(4, 8))
    x = b.dense(x, b.variable("b"), second)
    assert text(b.graph(x)) == [
        "net/a: ReadVariableOp MatMul Relu Tile Exp Sum",
        "net/b: Pad ReadVariableOp MatMul Relu",
    ]


def test_a_residual_sum_stays_with_what_it_follows() -> None:
    b = GraphBuilder()
    x = b.argument()
    net = b.call("net")
    first, second = b.call("net/a", net), b.call("net/b", net)
    y = b.dense(x, b.variable("a"), first)
    z = b.dense(y, b.variable("b"), second)
    b.add("AddV2", y, z, call=net)
    assert text(b.graph()) == [
        "net/a: ReadVariableOp MatMul Relu",
        "net/b: ReadVariableOp MatMul Relu AddV2",
    ]


def test_a_layer_called_twice_gives_two_units_and_its_weight_ties_nothing() -> None:
    b = GraphBuilder()
    x = b.argument()
    handle = b.variable("w")
    net = b.call("net")
    middle = b.variable("m")
    x = b.dense(x, handle, b.call("net/twice", net))
    x = b.dense(x, middle, b.call("net/middle", net))
    x = b.dense(x, handle, b.call("net/twice", net))
    units = build_units(b.graph(x))
    assert [u.name for u in units] == ["net/twice", "net/middle", "net/twice #2"]
    assert [u.variables for u in units] == [(0,), (1,), (0,)]


def test_users_of_a_written_variable_and_all_between_them_are_one_unit() -> None:
    b = GraphBuilder()
    x = b.argument()
    state = b.variable("state", read_only=False)
    net = b.call("net")
    calls = [b.call(f"net/{name}", net) for name in "abcd"]
    x = b.dense(x, b.variable("a"), calls[0])
    x = b.add("MatMul", x, b.read(state, calls[1]), call=calls[1])
    x = b.dense(x, b.variable("c"), calls[2])
    b.write(state, x, calls[3])
    x = b.add("Relu", x, call=calls[3])
    assert [u.name for u in build_units(b.graph(x))] == ["net/a", "net/b + … + net/d (3)"]


def test_an_unsendable_tensor_ties_its_ends() -> None:
    b = GraphBuilder()
    x = b.argument()
    net = b.call("net")
    calls = [b.call(f"net/{name}", net) for name in "abc"]
    x = b.add("Relu", x, call=calls[0])
    stack = b.add("TensorListFromTensor", x, call=calls[1], shape=(), dtype="variant")
    x = b.add("TensorListStack", stack, call=calls[2])
    assert text(b.graph(x)) == [
        "net/a: Relu",
        "net/b + net/c: TensorListFromTensor TensorListStack",
    ]


def test_colocated_ops_are_one_unit() -> None:
    node_def_pb2 = pytest.importorskip("tensorflow.core.framework.node_def_pb2")
    b = GraphBuilder()
    x = b.argument()
    net = b.call("net")
    calls = [b.call(f"net/{name}", net) for name in "abc"]
    x = b.add("Relu", x, call=calls[0])
    x = b.add("Relu", x, call=calls[1])
    definition = node_def_pb2.NodeDef(name="n", op="Relu")
    definition.attr["_class"].list.s.append(f"loc:@{b.nodes[-1].name}".encode())
    x = b.add("Relu", x, call=calls[2], definition=definition.SerializeToString())
    assert text(b.graph(x)) == ["net/a: Relu", "net/b + net/c: Relu Relu"]


def test_branches_keep_the_order_in_which_they_were_made() -> None:
    b = GraphBuilder()
    x = b.argument()
    net = b.call("net")
    left = b.dense(x, b.variable("l"), b.call("net/left", net))
    right = b.dense(x, b.variable("r"), b.call("net/right", net))
    join = b.call("net/join", net)
    y = b.add("ConcatV2", left, right, call=join)
    assert [u.name for u in build_units(b.graph(y))] == ["net/left", "net/right", "net/join"]


def test_ops_before_the_model_and_constants_belong_to_no_unit() -> None:
    b = GraphBuilder()
    x = b.add("Cast", b.argument(dtype="uint8"))
    net = b.call("net")
    layer = b.call("net/a", net)
    two = b.add("Const", call=layer, shape=())
    four = b.add("Mul", two, two, call=layer, shape=())
    y = b.add("Mul", x, four, call=layer)
    graph = b.graph(y)
    assert constants(graph) == {two.node, four.node}
    assert [u.nodes for u in build_units(graph)] == [(y.node,)]


def test_ops_between_two_models_are_units_of_their_own() -> None:
    b = GraphBuilder()
    x = b.argument()
    one, two = b.call("one"), b.call("two")
    x = b.dense(x, b.variable("w1"), one)
    x = b.add("MatMul", x, x)
    x = b.dense(x, b.variable("w2"), two)
    x = b.add("Mean", x, shape=())
    assert [u.name for u in build_units(b.graph(x))] == ["one", "step", "two", AFTER_MODEL]


def test_a_metric_of_the_script_belongs_to_no_unit_but_its_operand_does() -> None:
    b = GraphBuilder()
    x = b.argument()
    metric = b.variable("accuracy", (), in_model=False, read_only=False)
    net = b.call("net")
    y = b.dense(x, b.variable("w"), net)
    correct = b.add("Sum", y, shape=())
    b.add("AssignAddVariableOp", metric, correct, writes=(0,), stateful=True, outputs=())
    result = b.add("ReadVariableOp", metric, shape=(), reads=(0,))
    units = build_units(b.graph(result))
    assert [u.name for u in units] == ["net", AFTER_MODEL]
    assert units[-1].nodes == (correct.node,)


def test_a_gradient_taken_inside_the_model_is_part_of_it() -> None:
    b = GraphBuilder()
    x = b.argument()
    net = b.call("net")
    first, second = b.call("net/a", net), b.call("net/b", net)
    y = b.add("Tanh", x, call=first)
    inner = b.add("TanhGrad", y, y, forward_of=y)
    z = b.add("Relu", inner, call=second)
    outer = b.add("ReluGrad", z, z, forward_of=z)
    units = build_units(b.graph(outer))
    assert [n for u in units for n in u.nodes] == [y.node, inner.node, z.node]
    assert [n for u in units for n in u.backward] == [outer.node]


def test_what_follows_a_gradient_outside_the_model_belongs_to_no_unit() -> None:
    graph = chain_of_dense(1)
    b = GraphBuilder()
    b.nodes, b.calls = list(graph.nodes), list(graph.calls)
    b.variables, b.gradients = list(graph.variables), list(graph.gradients)
    norm = b.add("L2Loss", graph.gradients[0].tensors[0], shape=())
    units = build_units(b.graph(norm))
    assert norm.node not in {n for u in units for n in (*u.nodes, *u.backward)}


def test_manual_stages_part_units_and_are_kept() -> None:
    b = GraphBuilder()
    x = b.argument()
    net = b.call("net")
    low, high = b.call("net/low", net, stage=0), b.call("net/high", net, stage=1)
    a, c = b.call("net/low/a", low), b.call("net/high/c", high)
    x = b.dense(x, b.variable("a"), a)
    x = b.add("Exp", x, call=high)
    x = b.dense(x, b.variable("c"), c)
    units = build_units(b.graph(x))
    assert [(u.name, u.stage) for u in units] == [("net/low/a", 0), ("net/high/c", 1)]


def test_tied_units_with_different_manual_stages_are_an_error() -> None:
    b = GraphBuilder()
    x = b.argument()
    state = b.variable("state", read_only=False)
    net = b.call("net")
    low, high = b.call("net/low", net, stage=0), b.call("net/high", net, stage=1)
    x = b.add("MatMul", x, b.read(state, low), call=low)
    b.write(state, x, high)
    with pytest.raises(PlacementError, match=r"'net/low \+ net/high' contradict.*stages \[0, 1\]"):
        build_units(b.graph(x))


def test_a_step_without_a_model_is_an_error() -> None:
    b = GraphBuilder()
    x = b.add("Relu", b.argument())
    with pytest.raises(PlacementError, match="calls no distributed model"):
        build_units(b.graph(x))


def test_a_weight_read_elsewhere_counts_as_used_by_its_readers() -> None:
    b = GraphBuilder()
    x = b.argument()
    handle = b.variable("w")
    net = b.call("net")
    first, second = b.call("net/a", net), b.call("net/b", net)
    weight = b.add("Cast", b.read(handle, first), call=first, dtype="bfloat16", shape=(8, 8))
    y = b.add("MatMul", x, weight, call=first)
    z = b.add("MatMul", y, weight, call=second)
    graph = b.graph(z)
    assert weight_derived(graph)[weight.node] == {0}
    assert [u.variables for u in build_units(graph)] == [(0,), (0,)]


def test_every_forward_op_of_the_model_is_in_exactly_one_unit_in_topological_order() -> None:
    graph = chain_of_dense(5)
    units = build_units(graph)
    placed = [n for u in units for n in u.nodes]
    assert len(placed) == len(set(placed))
    assert {n for n, node in enumerate(graph.nodes) if node.call and not node.backward} <= set(placed)
    unit_of = {n: u.index for u in units for n in u.nodes}
    for number, index in unit_of.items():
        assert all(unit_of.get(t.node, 0) <= index for t in graph.nodes[number].inputs)


def test_an_op_with_several_outputs_counts_each_for_the_cut() -> None:
    b = GraphBuilder()
    x = b.argument()
    net = b.call("net")
    first, second = b.call("net/a", net), b.call("net/b", net)
    x = b.dense(x, b.variable("a"), first)
    small = TensorType("float32", (4, 1))
    parts = b.add("Split", x, call=net, outputs=(small,) * 8)
    y = b.add("Relu", parts, call=second, shape=(4, 1))
    assert text(b.graph(y)) == [
        "net/a: ReadVariableOp MatMul Relu Split",
        "net/b: Relu",
    ]


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        # One who needs it has stage 1, as the one made before it: it stays there, and x alone crosses.
        (1, ["net/first", "net/second", "net/side", "net/user", "net/join"]),
        # One who needs it has stage 0: there it must be, and go before what has stage 1.
        (0, ["net/first", "net/side", "net/user", "net/second", "net/join"]),
    ],
)
def test_a_unit_without_a_stage_goes_with_the_one_before_unless_who_needs_it_comes_earlier(
    user: int, expected: list[str]
) -> None:
    b = GraphBuilder()
    x = b.argument()
    net = b.call("net")
    first = b.dense(x, b.variable("f"), b.call("net/first", net))
    second = b.dense(first, b.variable("s"), b.call("net/second", net))
    side = b.add("Relu", x, call=b.call("net/side", net))
    used = b.dense(side, b.variable("u"), b.call("net/user", net))
    graph = b.graph(b.add("ConcatV2", second, used, call=b.call("net/join", net)))
    units = build_units(graph)
    assert [u.name for u in units] == ["net/first", "net/second", "net/side", "net/user", "net/join"]
    ordered = ordered_by_chunk(graph, units, [0, 1, None, user, None])
    assert [u.name for u in ordered] == expected
    assert [u.index for u in ordered] == [0, 1, 2, 3, 4]
