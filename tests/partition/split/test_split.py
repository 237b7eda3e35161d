"""Segments, transfers, stash and outputs of placed graphs, and cuts that are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from smp_tf.partition.errors import PlacementError
from smp_tf.partition.graph.op_graph import SEED, OpGraph, Tensor, TensorType
from smp_tf.partition.split.assign import assign
from smp_tf.partition.split.split import Segment, Split, Transfer, Visit
from smp_tf.partition.split.splitter import split
from smp_tf.partition.split.step_outputs import Delivery, StepOutputPlan
from tests.partition.op_graph_builder import GraphBuilder, chain_of_dense


def cut(
    graph: OpGraph,
    by_layer: Mapping[str, int],
    owners: Mapping[int, int] | None = None,
    local_outputs: frozenset[int] = frozenset(),
    composites: Sequence[tuple[int, ...]] = (),
    cut_backward: Sequence[int] = (),
) -> Split:
    """The split when the forward ops of each layer go to a stage."""
    stage_of = {
        number: by_layer[graph.calls[node.call].path]
        for number, node in enumerate(graph.nodes)
        if node.call and not node.backward
    }
    stages = 1 + max(by_layer.values())
    return split(assign(graph, stages, stage_of, owners), local_outputs, composites, cut_backward=cut_backward)


def dense_on(*stages: int, cut_backward: Sequence[int] = ()) -> Split:
    by_layer = {f"net/dense_{i}": stage for i, stage in enumerate(stages)}
    return cut(chain_of_dense(len(stages)), by_layer, cut_backward=cut_backward)


def names(result: Split, tensors: Sequence[Tensor]) -> list[str]:
    return [result.graph.nodes[t.node].name for t in tensors]


def table(result: Split) -> list[str]:
    """A transfer a line, from and to as stage.sweep; "-" for the start of the step and for its results."""
    lines = []
    for t in result.transfers:
        source, target = ("-" if sweep is None else sweep for sweep in (t.src_sweep, t.dst_sweep))
        assert (t.tensor is None) != (t.variable is None)
        what = names(result, [t.tensor])[0] if t.tensor else f"value of {result.graph.variables[t.variable or 0].name}"
        lines.append(f"{t.src_chunk}.{source} -> {t.dst_chunk}.{target} {'sum of ' * t.is_sum}{what}")
    return lines


def two_products() -> tuple[GraphBuilder, list[Tensor], list[int]]:
    """Two layers of one product each, of no weights; their outputs and calls."""
    b = GraphBuilder()
    net = b.call("net")
    calls = [b.call("net/a", net), b.call("net/b", net)]
    x = b.argument()
    y = b.add("MatMul", x, x, call=calls[0])
    z = b.add("MatMul", y, x, call=calls[1])
    return b, [y, z], calls


BY_LAYER = {"net/a": 0, "net/b": 1}


def has_effect(result: Split, segment: Segment) -> bool:
    """Whether a segment runs an op that must run even where nobody reads an output."""
    return any(result.graph.nodes[number].stateful for number in segment.nodes)


# --- a chain --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "transfers"),
    [
        ((0, 0, 0, 0), []),
        ((0, 0, 1, 1), ["0.0 -> 1.0 Relu_8", "1.0 -> 0.- Mean_17", "1.1 -> 0.1 MatMul_24"]),
        (
            (0, 1, 1, 2),
            [
                "0.0 -> 1.0 Relu_4",
                "1.0 -> 2.0 Relu_12",
                "2.0 -> 0.- Mean_17",
                "2.0 -> 1.- Mean_17",
                "2.1 -> 1.1 MatMul_21",
                "1.1 -> 0.1 MatMul_27",
            ],
        ),
        (
            (0, 1, 2, 3),
            [
                "0.0 -> 1.0 Relu_4",
                "1.0 -> 2.0 Relu_8",
                "2.0 -> 3.0 Relu_12",
                "3.0 -> 0.- Mean_17",
                "3.0 -> 1.- Mean_17",
                "3.0 -> 2.- Mean_17",
                "3.1 -> 2.1 MatMul_21",
                "2.1 -> 1.1 MatMul_24",
                "1.1 -> 0.1 MatMul_27",
            ],
        ),
    ],
)
def test_a_chain_sends_its_boundary_its_gradient_and_the_loss(stages: tuple[int, ...], transfers: list[str]) -> None:
    result = dense_on(*stages)
    assert table(result) == transfers
    assert [t.index for t in result.transfers] == list(range(len(transfers)))
    assert not any(t.once_per_step or t.is_sum for t in result.transfers)


def test_the_segments_of_a_chain() -> None:
    result = dense_on(0, 1)
    assert [node.name for node in result.graph.nodes] == [
        "SmpArgument_0", "SmpVariable_1", "ReadVariableOp_2", "MatMul_3", "Relu_4",
        "SmpVariable_5", "ReadVariableOp_6", "MatMul_7", "Relu_8", "Mean_9",
        "Fill_10", "ReluGrad_11", "MatMul_12", "MatMul_13", "ReluGrad_14", "MatMul_15",
    ]  # fmt: skip
    assert (result.stages, result.sweeps) == (2, 2)
    assert result.segments == {
        (0, 0, 0): Segment(Visit(0, 0, 0), (2, 3, 4), (0, 1), (), (), (Tensor(4, 0),)),
        (0, 1, 0): Segment(Visit(0, 1, 0), (14, 15), (0,), (Tensor(4, 0), Tensor(13, 0)), (), ()),
        (1, 0, 0): Segment(Visit(1, 0, 0), (6, 7, 8, 9), (5,), (Tensor(4, 0),), (), (Tensor(8, 0), Tensor(9, 0))),
        # The weight is read again and Fill is made again; neither is kept or sent.
        (1, 1, 0): Segment(
            Visit(1, 1, 0), (6, 10, 11, 12, 13), (5,), (Tensor(4, 0), Tensor(8, 0)), (), (Tensor(13, 0),)
        ),
    }
    assert result.transfers == (
        Transfer(0, Tensor(4, 0), None, 0, 0, 1, 0),
        Transfer(1, Tensor(9, 0), None, 1, 0, 0, None),
        Transfer(2, Tensor(13, 0), None, 1, 1, 0, 1),
    )
    assert names(result, result.stash(0)) == ["Relu_4"]
    assert names(result, result.stash(1)) == ["Relu_4", "Relu_8"]


def test_backward_is_cut_where_other_stages_need_no_more_of_it() -> None:
    whole, result = dense_on(0, 1), dense_on(0, 1, cut_backward=(0, 1))
    assert {key: segment for key, segment in result.segments.items() if key[1] == 1} == {
        # Nobody waits for what stage 0 makes.
        (0, 1, 1): Segment(Visit(0, 1, 1), (14, 15), (0,), (Tensor(4, 0), Tensor(13, 0)), (), ()),
        (1, 1, 0): Segment(Visit(1, 1, 0), (6, 10, 11, 13), (5,), (Tensor(8, 0),), (), (Tensor(11, 0), Tensor(13, 0))),
        (1, 1, 1): Segment(Visit(1, 1, 1), (12,), (), (Tensor(4, 0), Tensor(11, 0)), (), ()),
    }
    assert {key: s for key, s in result.segments.items() if key[1] == 0} == {
        key: s for key, s in whole.segments.items() if key[1] == 0
    }
    assert (result.transfers, result.outputs) == (whole.transfers, whole.outputs)
    # ReluGrad's result is kept from I to W.
    assert names(result, result.stash(1)) == ["Relu_8", "Relu_4", "ReluGrad_11"]


def test_one_stage_may_cut_its_backward_and_another_not() -> None:
    keys = {cut: sorted(key for key in dense_on(0, 1, cut_backward=cut).segments if key[1]) for cut in ((0,), (1,))}
    assert keys == {(0,): [(0, 1, 1), (1, 1, 0)], (1,): [(0, 1, 0), (1, 1, 0), (1, 1, 1)]}


def test_a_stage_with_nothing_to_do_has_no_segment_and_no_stash() -> None:
    result = cut(chain_of_dense(1), {"net/dense_0": 1})
    assert sorted(result.segments) == [(1, 0, 0), (1, 1, 0)]
    assert result.stash(0) == ()
    assert [(t.src_chunk, t.dst_chunk, t.dst_sweep) for t in result.transfers] == [(1, 0, None)]


def test_a_received_tensor_that_backward_needs_again_is_received_once_and_kept() -> None:
    """Its transfer names the first sweep that needs it."""
    result = dense_on(0, 1)
    (boundary,) = [t for t in result.transfers if t.tensor == Tensor(4, 0)]
    assert (boundary.dst_chunk, boundary.dst_sweep) == (1, 0)
    assert Tensor(4, 0) in result.segments[1, 1, 0].inputs


# --- what is copied -------------------------------------------------------------------------------------------------


def test_free_ops_are_copied_to_every_reader_and_never_sent() -> None:
    b, (y, z), calls = two_products()
    seed = b.add(SEED, shape=(2,), dtype="int64")
    mask = b.add("Greater", b.add("StatelessRandomUniform", seed), b.add("Const", shape=()))
    first = b.add("Mul", y, mask, call=calls[0])
    second = b.add("Mul", z, mask, call=calls[1])
    result = cut(b.graph(first, second), BY_LAYER, local_outputs=frozenset({0, 1}))
    copies = ["StatelessRandomUniform", "Const", "Greater"]
    assert {key: [result.graph.nodes[n].op for n in s.nodes] for key, s in result.segments.items()} == {
        (0, 0, 0): ["MatMul", *copies, "Mul"],
        (1, 0, 0): ["MatMul", *copies, "Mul"],
    }
    # Every stage takes the argument and the seed from its surroundings; only the product is sent.
    assert [s.sources for s in result.segments.values()] == [(0, seed.node), (0, seed.node)]
    assert [t.tensor for t in result.transfers] == [y]


def test_a_function_of_weights_is_made_on_both_stages_from_a_value_sent_once_per_step() -> None:
    b = GraphBuilder()
    net = b.call("net")
    calls = [b.call("net/a", net), b.call("net/b", net)]
    w = b.variable("w")
    turned = b.add("Transpose", b.read(w, calls[0]), call=calls[0], shape=(8, 8))
    y = b.add("MatMul", b.argument(), turned, call=calls[0])
    z = b.add("MatMul", y, turned, call=calls[1])
    result = cut(b.graph(z), BY_LAYER, local_outputs=frozenset({0}))
    assert [[result.graph.nodes[n].op for n in s.nodes] for _, s in sorted(result.segments.items())] == [
        ["ReadVariableOp", "Transpose", "MatMul"],
        ["ReadVariableOp", "Transpose", "MatMul"],
    ]
    assert [result.segments[stage, 0, 0].remote_values for stage in (0, 1)] == [(), (0,)]
    # The owner takes the handle; the other stage is fed the value and needs no handle.
    assert [result.segments[stage, 0, 0].sources for stage in (0, 1)] == [(w.node, 3), ()]
    assert result.transfers == (
        Transfer(0, y, None, 0, 0, 1, 0),
        Transfer(1, None, 0, 0, None, 1, 0),
    )
    assert [t.once_per_step for t in result.transfers] == [False, True]


@pytest.mark.parametrize("op", ["ResourceGather", "ResourceGatherNd", "VariableShape"])
def test_a_weight_may_be_gathered_from_and_asked_for_its_shape_from_afar(op: str) -> None:
    b, (y, z), calls = two_products()
    w = b.variable("w")
    here = b.add("MatMul", y, b.read(w, calls[0]), call=calls[0])
    there = b.add(op, w, z, call=calls[1], reads=(0,))
    result = cut(b.graph(here, there), BY_LAYER, local_outputs=frozenset({0, 1}))
    assert result.segments[1, 0, 0].remote_values == (0,)
    assert [t.variable for t in result.transfers] == [None, 0]


# --- effects and replicated ops -------------------------------------------------------------------------------------


def test_a_metric_is_written_on_every_stage_and_its_operand_sent_where_it_is_smallest() -> None:
    b, (_, z), _ = two_products()
    total = b.variable("total", (), in_model=False, read_only=False)
    value = b.add("Mean", z, shape=())
    b.add("AssignAddVariableOp", total, value, stateful=True, writes=(0,), outputs=())
    result_read = b.read(total)
    result = cut(b.graph(result_read), BY_LAYER)
    assert table(result) == ["0.0 -> 1.0 MatMul_1", "1.0 -> 0.2 Mean_4"]
    assert result.sweeps == 3
    for stage in (0, 1):
        segment = result.segments[stage, 2, 0]
        assert (segment.nodes, segment.sources, segment.inputs) == ((5, 6), (total.node,), (value,))
        assert (segment.outputs, has_effect(result, segment)) == ((result_read,), True)
    assert [has_effect(result, segment) for key, segment in result.segments.items() if key[1] < 2] == [False, False]
    assert result.outputs == (StepOutputPlan(result_read, Delivery.MADE_BY_ALL, None, False, follows_state=True),)


def test_an_effect_runs_on_one_stage_although_nobody_reads_it() -> None:
    b, (y, _), _ = two_products()
    b.add("PrintV2", y, stateful=True, outputs=())
    result = cut(b.graph(), BY_LAYER)
    assert [(key, has_effect(result, s)) for key, s in result.segments.items()] == [
        ((0, 0, 0), True),
        ((1, 0, 0), False),
    ]


# --- outputs --------------------------------------------------------------------------------------------------------


def test_a_forward_output_goes_to_all_and_a_gradient_stays() -> None:
    graph = chain_of_dense(2)
    gradients = [g.tensors[0] for g in graph.gradients]
    b = GraphBuilder()
    b.nodes, b.calls, b.variables, b.gradients = [*graph.nodes], [*graph.calls], [*graph.variables], [*graph.gradients]
    halved = b.add("Mul", gradients[1], shape=(8, 8))
    both = b.add("AddN", *gradients, shape=(8, 8))
    constant = b.add("Const", shape=())
    weight = b.read(Tensor(5, 0), 3)
    result = cut(
        b.graph(*graph.outputs, *gradients, halved, both, constant, weight), {"net/dense_0": 0, "net/dense_1": 1}
    )
    assert list(result.outputs) == [
        StepOutputPlan(graph.outputs[0], Delivery.SENT_TO_ALL, 1, False),
        StepOutputPlan(gradients[0], Delivery.LOCAL, 1, True),
        StepOutputPlan(gradients[1], Delivery.LOCAL, 0, True),
        StepOutputPlan(halved, Delivery.LOCAL, 0, True),  # a gradient, changed
        StepOutputPlan(both, Delivery.SENT_TO_ALL, 0, True),  # of gradients of several stages, as a norm is
        StepOutputPlan(constant, Delivery.MADE_BY_ALL, None, False),
        StepOutputPlan(weight, Delivery.SENT_TO_ALL, 1, False),
    ]
    assert [o.is_summed for o in result.outputs] == [False, True, True, True, False, False, False]
    assert [line for line in table(result) if ".- " in line] == [
        "1.0 -> 0.- Mean_9",
        f"0.1 -> 1.- AddN_{both.node}",
        f"1.0 -> 0.- ReadVariableOp_{weight.node}",
    ]
    for key in ((0, 2, 0), (1, 2, 0)):
        assert result.segments[key].nodes == (constant.node,)
        assert result.segments[key].outputs == (constant,)


def test_a_norm_goes_to_all_also_where_a_scalar_weight_has_a_gradient_of_its_type() -> None:
    b, (y, z), _ = two_products()
    w, scale = b.variable("w"), b.variable("scale", ())
    of_scale = b.add("Sum", z, shape=(), forward_of=z)
    of_w = b.add("MatMul", of_scale, y, shape=(8, 8), forward_of=y)
    b.gradient(scale, of_scale)
    b.gradient(w, of_w)
    norm = b.add("AddN", b.add("L2Loss", of_scale, shape=()), b.add("L2Loss", of_w, shape=()), shape=())
    clipped = b.add("Mul", of_w, norm, shape=(8, 8))
    result = cut(b.graph(norm, clipped), BY_LAYER)
    assert [o.delivery for o in result.outputs] == [Delivery.SENT_TO_ALL, Delivery.LOCAL]


def test_an_output_named_local_stays_with_its_stage() -> None:
    result = cut(chain_of_dense(2), {"net/dense_0": 0, "net/dense_1": 1}, local_outputs=frozenset({0}))
    assert [(o.delivery, o.chunk, o.is_summed) for o in result.outputs] == [(Delivery.LOCAL, 1, False)]
    assert [t.dst_sweep for t in result.transfers] == [0, 1]


def test_an_output_that_another_stage_reads_as_well_is_sent_there_once() -> None:
    b, (y, z), _ = two_products()
    result = cut(b.graph(y, z), BY_LAYER)
    assert table(result) == ["0.0 -> 1.0 MatMul_1", "1.0 -> 0.- MatMul_2"]


def shared_weight(op: str = "AddN", returned_twice: bool = False, read_again: bool = False) -> Split:
    """A weight multiplied with on both stages; its gradient is the sum of one contribution of each."""
    b, (y, z), calls = two_products()
    w = b.variable("w")
    first = b.add("MatMul", y, b.read(w, calls[0]), call=calls[0])
    second = b.add("MatMul", b.add("AddV2", first, z, call=calls[1]), b.read(w, calls[1]), call=calls[1])
    g = b.add("Neg", second, forward_of=second)
    late = b.add("MatMul", g, shape=(8, 8), forward_of=second)
    early = b.add("MatMul", b.add("MatMul", g, forward_of=second), shape=(8, 8), forward_of=first)
    total = b.add(op, late, early, shape=(8, 8), backward=True)
    b.gradient(w, total)
    outputs = [total, total] if returned_twice else [total]
    if read_again:
        b.add("L2Loss", total, shape=(), stateful=True)
    return cut(b.graph(*outputs), BY_LAYER, owners={0: 1})


def once_per_step(result: Split) -> list[str]:
    return [line for line, t in zip(table(result), result.transfers, strict=True) if t.once_per_step]


def test_contributions_to_a_weights_gradient_are_summed_where_they_are_made_and_added_at_its_owner() -> None:
    result = shared_weight()
    (output,) = result.outputs
    late, early = output.summands
    assert (output.chunk, output.is_summed) == (1, True)
    assert [result.assignment.places[t.node].chunk for t in output.summands] == [1, 0]
    assert once_per_step(result) == [f"0.1 -> 1.- sum of MatMul_{early.node}", "1.- -> 0.0 value of w"]
    assert late in result.segments[1, 1, 0].outputs
    assert early in result.segments[0, 1, 0].outputs
    assert not any(output.tensor.node in segment.nodes for segment in result.segments.values())
    assert not any(t.tensor == late for t in result.transfers)


@pytest.mark.parametrize("change", [{"op": "MatMul"}, {"returned_twice": True}, {"read_again": True}])
def test_a_gradient_that_is_no_plain_sum_is_made_and_its_sum_goes_to_the_owner_once(change: dict) -> None:
    result = shared_weight(**change)
    output = result.outputs[0]
    assert output.summands == (output.tensor,)
    assert output.chunk == 1
    name = names(result, [output.tensor])[0]
    assert once_per_step(result) == [f"0.1 -> 1.- sum of {name}", "1.- -> 0.0 value of w"]
    assert output.tensor.node in result.segments[0, 1, 0].nodes


def test_parts_of_sparse_slices_go_where_the_values_are() -> None:
    b, (y, z), _ = two_products()
    table = b.variable("table")
    values = b.add("Neg", b.add("Neg", z, forward_of=z), forward_of=y)
    indices = b.add("Reshape", b.argument(dtype="int32"), dtype="int32", backward=True)
    shape = b.add("Const", shape=(2,), dtype="int32", backward=True)
    b.gradient(table, values, indices, shape)
    result = cut(b.graph(values, indices, shape), BY_LAYER, composites=[(0, 1, 2)])
    assert [(o.delivery, o.chunk, o.is_gradient, o.is_part) for o in result.outputs] == [
        (Delivery.LOCAL, 0, True, True)
    ] * 3
    assert {values, indices, shape} <= set(result.segments[0, 1, 0].outputs)
    assert not any(o.is_summed for o in result.outputs)


def test_of_a_composite_forward_output_a_part_that_all_make_is_not_sent() -> None:
    b, (_, z), _ = two_products()
    shape = b.add("Const", shape=(2,), dtype="int32")
    result = cut(b.graph(z, shape), BY_LAYER, composites=[(0, 1)])
    assert list(result.outputs) == [
        StepOutputPlan(z, Delivery.SENT_TO_ALL, 1, False, is_part=True),
        StepOutputPlan(shape, Delivery.MADE_BY_ALL, None, False, is_part=True),
    ]
    assert table(result) == ["0.0 -> 1.0 MatMul_1", "1.0 -> 0.- MatMul_2"]


def test_sparse_slices_made_away_from_their_owner_are_refused() -> None:
    b, (y, z), _ = two_products()
    table = b.variable("table")
    values = b.add("Neg", b.add("Neg", z, forward_of=z), forward_of=y)
    indices = b.add("Const", dtype="int32", backward=True)
    b.gradient(table, values, indices)
    with pytest.raises(PlacementError, match="'Neg_5' is made on stage 0, but stage 1 owns its variable"):
        cut(b.graph(values, indices), BY_LAYER, owners={0: 1}, composites=[(0, 1)])


# --- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["resource", "variant", "string"])
def test_a_cut_through_what_cannot_leave_its_process_is_refused(dtype: str) -> None:
    b, (y, _), calls = two_products()
    stack = b.add("TensorListFromTensor", y, call=calls[0], dtype=dtype)
    item = b.add("TensorListGetItem", stack, call=calls[1])
    graph = b.graph(item)
    with pytest.raises(
        PlacementError, match=rf"TensorListFromTensor_3:0 \({dtype}\) is made on stage 0 and needed on st"
    ):
        cut(graph, BY_LAYER)
    assert cut(graph, {"net/a": 0, "net/b": 0}).transfers == ()


def test_what_cannot_leave_its_process_may_be_kept_for_backward() -> None:
    b, (y, z), calls = two_products()
    stack = b.add("TensorListFromTensor", y, call=calls[0], dtype="variant")
    g = b.add("Neg", z, forward_of=z)
    back = b.add("Mul", g, stack, forward_of=stack)
    result = cut(b.graph(back), BY_LAYER)
    assert result.stash(0) == (stack,)
    assert [t.tensor for t in result.transfers] == [y, g, back]


def test_returning_what_cannot_leave_its_process_is_refused_unless_it_is_local() -> None:
    b, (y, _), calls = two_products()
    text = b.add("AsString", y, call=calls[0], outputs=(TensorType("string", ()),))
    graph = b.graph(text)
    with pytest.raises(PlacementError, match=r"returns 'AsString_3', a tensor of type string, which stage 0 makes"):
        cut(graph, BY_LAYER)
    assert cut(graph, BY_LAYER, local_outputs=frozenset({0})).outputs[0].delivery is Delivery.LOCAL
    assert cut(graph, {"net/a": 0, "net/b": 0}).outputs[0].delivery is Delivery.SENT_TO_ALL


def test_a_write_away_from_the_owner_is_refused() -> None:
    b, (_, z), calls = two_products()
    mean = b.variable("net/mean", read_only=False)
    b.write(mean, z, calls[1])
    with pytest.raises(PlacementError) as raised:
        cut(b.graph(z), BY_LAYER, owners={0: 0})
    assert str(raised.value) == (
        "Op 'AssignVariableOp_4' (AssignVariableOp) on stage 1 needs the handle of 'net/mean', which stage 0 owns. "
        "Only plain reads of a weight that the step does not write may cross stages."
    )


def test_a_read_away_from_the_owner_of_a_weight_that_the_step_writes_is_refused() -> None:
    b, (y, z), calls = two_products()
    mean = b.variable("net/mean", read_only=False)
    b.write(mean, y, calls[0])
    read = b.read(mean, calls[1])
    with pytest.raises(
        PlacementError, match=r"'ReadVariableOp_5' .* on stage 1 needs the handle of 'net/mean', which st"
    ):
        cut(b.graph(z, read), BY_LAYER)


def test_another_op_with_the_handle_of_another_stages_weight_is_refused() -> None:
    b, (y, z), calls = two_products()
    own, w = b.variable("own"), b.variable("w")
    here = b.add("MatMul", y, b.read(w, calls[0]), call=calls[0])
    called = b.add("PartitionedCall", own, w, z, call=calls[1], reads=(0, 1))
    with pytest.raises(
        PlacementError,
        match=r"'PartitionedCall_7' \(PartitionedCall\) on stage 1 needs the handle of 'w', which st",
    ):
        cut(b.graph(here, called), BY_LAYER)
