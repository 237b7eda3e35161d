"""Stage, sweep and role of every op, for graphs written by hand."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from smp_tf.partition.errors import PlacementError
from smp_tf.partition.graph.op_graph import SEED, OpGraph, Tensor, TensorType
from smp_tf.partition.split.assign import Assignment, Place, Role, assign
from tests.partition.op_graph_builder import GraphBuilder, chain_of_dense


def placed(
    graph: OpGraph, by_layer: Mapping[str, int], stages: int, owners: Mapping[int, int] | None = None
) -> Assignment:
    """The assignment when the forward ops of each layer go to a stage."""
    stage_of = {
        number: by_layer[graph.calls[node.call].path]
        for number, node in enumerate(graph.nodes)
        if node.call and not node.backward
    }
    return assign(graph, stages, stage_of, owners)


def table(assignment: Assignment) -> list[str]:
    """A node a line: its name, then "free", "everywhere <sweep>", or role and stage.sweep."""
    lines = []
    for node, place in zip(assignment.graph.nodes, assignment.places, strict=True):
        where = {
            Role.FREE: "free",
            Role.REPLICATED: f"everywhere {place.sweep}",
            Role.WEIGHT: f"weight of {place.chunk}",
            Role.HOME: f"{place.chunk}.{place.sweep}",
        }[place.role]
        lines.append(f"{node.name} {where}")
    return lines


def two_layers() -> tuple[GraphBuilder, list[Tensor], list[int]]:
    """Two calls, of one product and one Tanh; their outputs."""
    b = GraphBuilder()
    net = b.call("net")
    calls = [b.call("net/a", net), b.call("net/b", net)]
    x = b.argument()
    y = b.add("MatMul", x, x, call=calls[0])
    z = b.add("Tanh", y, call=calls[1])
    return b, [y, z], calls


BY_LAYER = {"net/a": 0, "net/b": 1}


# --- the way up and down --------------------------------------------------------------------------------------------


def test_a_chain_goes_up_in_the_first_sweep_and_down_in_the_second() -> None:
    graph = chain_of_dense(3)
    assignment = placed(graph, {"net/dense_0": 0, "net/dense_1": 1, "net/dense_2": 1}, 2)
    assert table(assignment) == [
        "SmpArgument_0 free",
        "SmpVariable_1 free",
        "ReadVariableOp_2 weight of 0",
        "MatMul_3 0.0",
        "Relu_4 0.0",
        "SmpVariable_5 free",
        "ReadVariableOp_6 weight of 1",
        "MatMul_7 1.0",
        "Relu_8 1.0",
        "SmpVariable_9 free",
        "ReadVariableOp_10 weight of 1",
        "MatMul_11 1.0",
        "Relu_12 1.0",
        "Mean_13 1.0",
        "Fill_14 free",
        "ReluGrad_15 1.1",
        "MatMul_16 1.1",
        "MatMul_17 1.1",
        "ReluGrad_18 1.1",
        "MatMul_19 1.1",
        "MatMul_20 1.1",
        "ReluGrad_21 0.1",
        "MatMul_22 0.1",
    ]
    assert (assignment.stages, assignment.sweeps, assignment.owners) == (2, 2, (0, 1, 1))


def test_a_forward_pass_alone_has_one_sweep() -> None:
    b, (_, z), _ = two_layers()
    assignment = placed(b.graph(z), BY_LAYER, 2)
    assert (assignment.sweeps, assignment.replicated_sweep) == (1, 2)


def test_gradients_clipped_by_a_norm_over_all_stages_stay_where_they_are_and_the_norm_comes_to_them() -> None:
    """The norm flows up again, which opens a third sweep."""
    graph = chain_of_dense(2)
    b = GraphBuilder()
    b.nodes, b.calls, b.variables = list(graph.nodes), list(graph.calls), list(graph.variables)
    gradients = {g.variable: g.tensors[0] for g in graph.gradients}
    squares = [b.add("L2Loss", gradients[v], shape=()) for v in (0, 1)]
    norm = b.add("AddN", *squares, shape=())
    clipped = [b.add("Mul", gradients[v], norm, shape=(8, 8)) for v in (0, 1)]
    assignment = placed(b.graph(*clipped), {"net/dense_0": 0, "net/dense_1": 1}, 2)
    assert table(assignment)[len(graph.nodes) :] == [
        f"L2Loss_{squares[0].node} 0.1",
        f"L2Loss_{squares[1].node} 1.1",
        f"AddN_{norm.node} 0.1",  # gradients flow towards the first stage
        f"Mul_{clipped[0].node} 0.1",
        f"Mul_{clipped[1].node} 1.2",
    ]
    assert (assignment.sweeps, assignment.replicated_sweep) == (3, 3)


def test_a_backward_op_that_reads_an_earlier_stages_gradient_waits_for_the_next_way_up() -> None:
    b, (y, z), _ = two_layers()
    g = b.add("Neg", z, forward_of=z)
    down = b.add("TanhGrad", g, forward_of=y)
    up = b.add("TanhGrad", down, forward_of=z)
    assert table(placed(b.graph(up), BY_LAYER, 2))[3:] == ["Neg_3 1.1", "TanhGrad_4 0.1", "TanhGrad_5 1.2"]


def test_a_forward_op_that_reads_a_later_stage_waits_for_the_way_back() -> None:
    """A layer that is visited again after a later one, where partitions are not contiguous."""
    b, (_, z), calls = two_layers()
    again = b.add("Relu", z, call=calls[0])
    up = b.add("Relu", again, call=calls[1])
    assignment = placed(b.graph(up), BY_LAYER, 2)
    assert table(assignment)[3:] == ["Relu_3 0.1", "Relu_4 1.2"]
    assert assignment.sweeps == 3


# --- ops outside the model ------------------------------------------------------------------------------------------


def test_what_follows_the_model_is_where_its_latest_input_is() -> None:
    b, (y, z), _ = two_layers()
    early = b.add("Mean", y, shape=())
    late = b.add("AddV2", early, b.add("Mean", z, shape=()), shape=())
    assert table(placed(b.graph(late), BY_LAYER, 3))[3:] == ["Mean_3 0.0", "Mean_4 1.0", "AddV2_5 1.0"]


def test_what_follows_gradients_of_several_stages_is_where_they_arrive_last() -> None:
    b, (y, z), _ = two_layers()
    late = b.add("TanhGrad", z, forward_of=z)
    early = b.add("TanhGrad", late, forward_of=y)
    both = b.add("AddN", late, early)
    summed = b.add("Sum", early, shape=(8,))
    of_forward_too = b.add("Mul", z, summed)
    assert table(placed(b.graph(both, of_forward_too), BY_LAYER, 2))[3:] == [
        "TanhGrad_3 1.1",
        "TanhGrad_4 0.1",
        "AddN_5 0.1",
        "Sum_6 0.1",
        "Mul_7 0.1",  # the forward tensor comes along, large as it is: it is from an earlier sweep
    ]


def test_an_expensive_op_between_arguments_and_model_runs_once_on_its_first_users_stage() -> None:
    b = GraphBuilder()
    net = b.call("net")
    calls = [b.call(f"net/{name}", net) for name in "abc"]
    x = b.argument()
    before = b.add("MatMul", x, x)
    unread = b.add("MatMul", x, x)
    unread_too = b.add("MatMul", unread, x)
    y = b.add("Tanh", x, call=calls[0])
    late = b.add("Mul", b.add("Relu", before, call=calls[2]), y, call=calls[2])
    early = b.add("Relu", before, call=calls[1])
    assignment = placed(b.graph(late, early, unread_too), {"net/a": 0, "net/b": 1, "net/c": 2}, 3)
    assert table(assignment)[1:4] == ["MatMul_1 1.0", "MatMul_2 2.0", "MatMul_3 2.0"]


def test_the_first_user_is_found_through_cheap_ops() -> None:
    b = GraphBuilder()
    net = b.call("net")
    call = b.call("net/b", net)
    x = b.argument()
    product = b.add("MatMul", x, x)
    scaled = b.add("Neg", b.add("Neg", product))
    y = b.add("Tanh", scaled, call=call)
    assert table(placed(b.graph(y), {"net/b": 1}, 3))[1:] == ["MatMul_1 1.0", "Neg_2 1.0", "Neg_3 1.0", "Tanh_4 1.0"]


def test_effects_run_once_where_their_inputs_are() -> None:
    b, (y, _), _ = two_layers()
    shown = b.add("PrintV2", y, stateful=True, outputs=())
    alone = b.add("PrintV2", b.argument(), stateful=True, outputs=())
    lines = table(placed(b.graph(y), BY_LAYER, 2))
    assert lines[shown.node] == "PrintV2_3 0.0"
    assert lines[alone.node] == "PrintV2_5 1.0"  # of arguments alone: the last stage


# --- FREE -----------------------------------------------------------------------------------------------------------


def test_sources_and_cheap_functions_of_them_are_free() -> None:
    b, (_, z), _ = two_layers()
    x = b.argument()
    captured = b.add("SmpCapture")
    seed = b.add(SEED, shape=(2,), dtype="int64")
    constant = b.add("Const", shape=())
    free = [
        b.add("Mul", x, constant),
        b.add("Shape", captured, shape=(2,), dtype="int32"),
        b.add("StatelessRandomUniform", seed),
        b.add("StringJoin", dtype="string"),
        b.add("Mul", constant, x, backward=True),
    ]
    lines = table(placed(b.graph(z), BY_LAYER, 2))
    assert {line.split()[1] for line in lines[3:]} == {"free"}
    assert len(lines[3:]) == 4 + len(free)


def test_a_layer_that_computes_a_mask_from_the_arguments_is_copied_like_any_cheap_op() -> None:
    b = GraphBuilder()
    call = b.call("net/mask", b.call("net"))
    mask = b.add("NotEqual", b.argument(), b.add("Const", shape=()), call=call, dtype="bool")
    assert table(placed(b.graph(mask), {"net/mask": 1}, 2))[-1] == "NotEqual_2 free"


@pytest.mark.parametrize("op", ["MatMul", "Conv2D", "PartitionedCall", "While", "StatelessIf", "SmpSumOverReplicas"])
def test_what_costs_is_not_copied(op: str) -> None:
    b, (_, z), _ = two_layers()
    heavy = b.add(op, b.argument())
    assert table(placed(b.graph(z, heavy), BY_LAYER, 2))[-1] == f"{op}_{heavy.node} 1.0"


def test_what_has_an_effect_or_gives_a_handle_is_not_copied() -> None:
    b, (_, z), _ = two_layers()
    x = b.argument()
    b.add("RandomUniform", x, stateful=True)
    b.add("EmptyTensorList", x, dtype="variant")
    b.add("IteratorV2", dtype="resource")
    assert [line.split()[1] for line in table(placed(b.graph(z), BY_LAYER, 2))[4:]] == ["1.0", "1.0", "1.0"]


def test_a_function_of_what_is_made_on_one_stage_is_not_free() -> None:
    b, (y, _), _ = two_layers()
    both = b.add("AddV2", y, b.argument())
    assert table(placed(b.graph(both), BY_LAYER, 2))[-1] == f"AddV2_{both.node} 0.0"


# --- WEIGHT ---------------------------------------------------------------------------------------------------------


def test_reads_of_unwritten_weights_and_cheap_functions_of_them_are_made_where_they_are_read() -> None:
    b = GraphBuilder()
    net = b.call("net")
    calls = {name: b.call(f"net/{name}", net) for name in "ab"}
    x = b.argument()
    w, v = b.variable("w"), b.variable("v")
    read = b.read(w, calls["a"])
    turned = b.add("Transpose", read, b.add("Const", shape=(2,)), call=calls["a"])
    both = b.add("AddV2", turned, b.read(v, calls["b"]), call=calls["b"])
    squared = b.add("MatMul", both, both, call=calls["b"])
    fed = b.add("Mul", read, x, call=calls["a"])
    lines = table(placed(b.graph(squared, fed), {"net/a": 0, "net/b": 1}, 2))
    assert lines[3:] == [
        "ReadVariableOp_3 weight of 0",
        "Const_4 free",
        "Transpose_5 weight of 0",
        "ReadVariableOp_6 weight of 1",
        "AddV2_7 weight of 0",
        "MatMul_8 1.0",  # too much work to do twice
        "Mul_9 0.0",  # not of weights alone
    ]


def test_a_weight_that_the_step_writes_is_read_once_at_its_owner() -> None:
    b = GraphBuilder()
    net = b.call("net")
    calls = {name: b.call(f"net/{name}", net) for name in "ab"}
    mean = b.variable("mean", (8,), read_only=False)
    read = b.read(mean, calls["b"])
    b.write(mean, b.add("Neg", read, call=calls["b"]), calls["b"])
    x = b.add("Tanh", b.argument(), call=calls["a"])
    y = b.add("Sub", x, read, call=calls["b"])
    assignment = placed(b.graph(y), {"net/a": 0, "net/b": 1}, 2)
    assert [line.split()[1] for line in table(assignment)[1:4]] == ["1.0", "1.0", "1.0"]
    assert assignment.owners == (1,)


# --- owners ---------------------------------------------------------------------------------------------------------


def shared_weight() -> OpGraph:
    """One weight, multiplied with in two layers."""
    b = GraphBuilder()
    net = b.call("net")
    w = b.variable("w")
    x = b.argument()
    for name in ("net/a", "net/b"):
        x = b.dense(x, w, b.call(name, net))
    return b.graph(x)


def test_a_shared_weight_belongs_to_its_first_user() -> None:
    assert placed(shared_weight(), {"net/a": 0, "net/b": 1}, 2).owners == (0,)
    assert placed(shared_weight(), {"net/a": 1, "net/b": 0}, 2).owners == (1,)


def test_an_owner_decided_before_stays() -> None:
    assignment = placed(shared_weight(), {"net/a": 0, "net/b": 1}, 2, owners={0: 1})
    assert assignment.owners == (1,)
    assert [p for p in assignment.places if p.role is Role.WEIGHT] == [Place(Role.WEIGHT, 1, 0)] * 2


def test_a_variable_of_the_model_that_no_layer_uses_has_an_owner_and_one_of_the_script_none() -> None:
    b, (_, z), _ = two_layers()
    b.variable("unused")
    scale = b.variable("scale", (), in_model=False)
    b.add("Mul", z, b.read(scale))
    assert placed(b.graph(z), BY_LAYER, 2).owners == (0, None)


def test_an_op_outside_the_model_that_touches_a_weight_runs_at_its_owner() -> None:
    b, (_, z), _ = two_layers()
    norm = b.variable("net/norm", ())
    count = b.variable("net/count", (), read_only=False)
    outside = b.read(norm)
    b.write(count, b.add("Const", shape=()))
    lines = table(placed(b.graph(z, outside), BY_LAYER, 3, owners={0: 1, 1: 0}))
    assert lines[5] == "ReadVariableOp_5 1.0"
    assert lines[7] == "AssignVariableOp_7 0.0"


# --- REPLICATED -----------------------------------------------------------------------------------------------------


def test_a_metric_of_the_script_is_written_on_every_rank_after_everything_else() -> None:
    b, (_, z), _ = two_layers()
    total = b.variable("total", (), in_model=False, read_only=False)
    value = b.add("Mean", z, shape=())
    b.add("AssignAddVariableOp", total, value, stateful=True, reads=(0,), writes=(0,), outputs=())
    result = b.add("Neg", b.read(total), shape=())
    assignment = placed(b.graph(result), BY_LAYER, 2)
    assert table(assignment)[3:] == [
        "SmpVariable_3 free",
        "Mean_4 1.0",
        "AssignAddVariableOp_5 everywhere 2",
        "ReadVariableOp_6 everywhere 2",
        "Neg_7 everywhere 2",
    ]
    assert assignment.sweeps == 1
    assert assignment.owners == (None,)


def test_the_sweep_of_replicated_ops_is_after_a_third_sweep() -> None:
    b, (y, z), _ = two_layers()
    total = b.variable("total", (), in_model=False, read_only=False)
    g = b.add("Neg", z, forward_of=z)
    up = b.add("TanhGrad", b.add("TanhGrad", g, forward_of=y), forward_of=z)
    b.write(total, up)
    assignment = placed(b.graph(up), BY_LAYER, 2)
    assert table(assignment)[-1].endswith("everywhere 3")
    assert (assignment.sweeps, assignment.replicated_sweep) == (3, 3)


def test_a_variable_of_the_script_that_is_only_read_replicates_nothing() -> None:
    b, (_, z), _ = two_layers()
    scale = b.variable("scale", (), in_model=False)
    b.add("Mul", z, b.read(scale))
    assert table(placed(b.graph(z), BY_LAYER, 2))[-2:] == ["ReadVariableOp_4 free", "Mul_5 1.0"]


def test_the_model_must_not_depend_on_a_variable_of_the_script_that_the_step_assigns() -> None:
    b = GraphBuilder()
    net = b.call("net")
    call = b.call("net/a", net)
    counter = b.variable("counter", (), in_model=False, read_only=False)
    b.write(counter, b.add("Const", shape=()))
    y = b.add("Mul", b.argument(), b.read(counter), call=call)
    with pytest.raises(PlacementError, match=r"Op 'Mul_5' inside the model uses 'a script variable'") as raised:
        placed(b.graph(y), {"net/a": 0}, 2)
    assert "lives on every rank, the model's ops on one" in str(raised.value)
    b = GraphBuilder()
    call = b.call("net")
    counter = b.variable("counter", (), in_model=False, read_only=False)
    b.write(counter, b.add("Const", shape=()), call)
    with pytest.raises(PlacementError, match="Op 'AssignVariableOp_2' inside the model uses 'counter', a variable"):
        placed(b.graph(), {"net": 0}, 2)


def test_ops_with_no_output_or_several_are_placed_like_others() -> None:
    b, (y, z), _ = two_layers()
    b.add("NoOp", outputs=())
    b.add("Assert", y, outputs=(), stateful=True)
    b.add("Split", z, outputs=(TensorType("float32", (2,)), TensorType("float32", (2,))))
    assert table(placed(b.graph(z), BY_LAYER, 2))[3:] == ["NoOp_3 free", "Assert_4 0.0", "Split_5 1.0"]
