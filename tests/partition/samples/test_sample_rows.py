"""Which tensors hold rows: constants in the shape of the samples do, what a layer computes of all samples does not."""

from __future__ import annotations

import dataclasses

import pytest
from tensorflow.core.framework import node_def_pb2
from tensorflow.python.framework import tensor_util

from smp_tf.partition.graph.op_graph import OpGraph, Tensor
from smp_tf.partition.samples.batch_tail import find_tail
from smp_tf.partition.samples.one_microbatch import OneMicrobatch
from smp_tf.partition.samples.sample_rows import SampleRows
from tests.partition.op_graph_builder import GraphBuilder


def layer(n: int) -> tuple[OpGraph, Tensor, Tensor]:
    """A layer that normalises its input and also adds the variance of its input; the variance, and the output."""
    builder = GraphBuilder()
    x, kernel = builder.argument((n, 4)), builder.variable("net/kernel", (4, 3))
    dense, norm = builder.call("net/dense"), builder.call("net/norm")
    hidden = builder.add("MatMul", x, builder.read(kernel, dense), call=dense, shape=(n, 3))
    mean = builder.add("Mean", hidden, call=norm, shape=(1, 3))
    away = builder.add("Sub", hidden, mean, call=norm, shape=(n, 3))
    square = builder.add("Square", away, call=norm, shape=(n, 3))
    variance = builder.add("Mean", square, call=norm, shape=())
    normal = builder.add("Mul", away, builder.add("Rsqrt", variance, call=norm, shape=()), call=norm, shape=(n, 3))
    loss = builder.add("Sum", normal, shape=())
    return builder.graph(variance, loss), variance, normal


def test_a_statistic_that_a_layer_adds_is_computed_of_what_the_layer_before_gives() -> None:
    (whole, variance, normal), (part, _, _) = layer(8), layer(2)
    rows = SampleRows(whole, part, 8)
    tail = find_tail(whole, rows, {"variance": (variance,)})
    assert [whole.nodes[cut.whole.node].op for cut in tail.cuts] == ["MatMul"]
    assert [whole.nodes[number].op for number in tail.nodes] == ["Mean", "Sub", "Square", "Mean"]
    # Its output is what microbatches see, as that of any layer.
    assert rows.of(normal).rows == 0


def constant(builder: GraphBuilder, shape: tuple[int, ...]) -> Tensor:
    definition = node_def_pb2.NodeDef(name="zeros", op="Const")
    definition.attr["value"].tensor.CopyFrom(tensor_util.make_tensor_proto(0.0, shape=shape))
    return builder.add("Const", shape=shape, definition=definition.SerializeToString())


@pytest.mark.parametrize(("of_part", "rows"), [((2, 3), 0), ((8, 3), None)])
def test_zeros_in_the_shape_of_the_samples_are_rows_and_others_of_that_length_are_not(
    of_part: tuple[int, int], rows: int | None
) -> None:
    graphs = []
    for n, shape in ((8, (8, 3)), (2, of_part)):
        builder = GraphBuilder()
        builder.argument((n, 3))
        graphs.append(builder.graph(constant(builder, shape)))
    assert SampleRows(*graphs, 8).of(graphs[0].outputs[0]).rows == rows


def two_views(n: int, *, stacked: bool) -> tuple[OpGraph, dict[str, Tensor]]:
    """A layer that is given two views of n samples, one after the other or sample by sample, and what comes of it."""
    builder = GraphBuilder()
    x, kernel = builder.argument((n, 4)), builder.variable("net/kernel", (4, 3))
    dense, axis = builder.call("net/dense"), constant_of(builder, [0])
    if stacked:
        joined = builder.add("ConcatV2", x, builder.add("Neg", x, shape=(n, 4)), axis, shape=(2 * n, 4))
    else:
        pairs = builder.add("Pack", x, builder.add("Neg", x, shape=(n, 4)), shape=(n, 2, 4))
        joined = builder.add("Reshape", pairs, constant_of(builder, [-1, 4]), shape=(2 * n, 4))
    out = builder.add("MatMul", joined, builder.read(kernel, dense), call=dense, shape=(2 * n, 3))
    squares = builder.add("Square", out, shape=(2 * n, 3))
    similar = builder.add("MatMul", squares, squares, shape=(2 * n, 2 * n))
    found = {"joined": joined, "out": out, "squares": squares, "similar": similar}
    return builder.graph(similar), found


def constant_of(builder: GraphBuilder, values: list[int]) -> Tensor:
    definition = node_def_pb2.NodeDef(name=f"numbers_{len(values)}", op="Const")
    definition.attr["value"].tensor.CopyFrom(tensor_util.make_tensor_proto(values))
    return builder.add("Const", shape=(len(values),), definition=definition.SerializeToString())


def test_two_views_of_all_samples_are_two_blocks_of_rows_behind_a_layer_too() -> None:
    (whole, found), (part, _) = two_views(8, stacked=True), two_views(2, stacked=True)
    rows = SampleRows(whole, part, 8)
    told = {name: (rows.of(tensor).rows, rows.of(tensor).blocks) for name, tensor in found.items()}
    assert told == {"joined": (0, 2), "out": (0, 2), "squares": (0, 2), "similar": (None, 2)}


def test_copies_of_each_sample_one_by_one_are_no_blocks() -> None:
    (whole, found), (part, _) = two_views(8, stacked=False), two_views(2, stacked=False)
    rows = SampleRows(whole, part, 8)
    assert rows.of(found["out"]).rows is None
    assert {rows.of(tensor).blocks for tensor in found.values()} == {1}


@pytest.mark.parametrize(
    ("masks", "strides", "rows"),
    [
        ({"begin_mask": 3, "end_mask": 1}, [1, 1], 0),
        ({"begin_mask": 2, "ellipsis_mask": 1}, [1, 1], 0),
        ({"begin_mask": 4, "ellipsis_mask": 1, "new_axis_mask": 2}, [1, 1, 1], 0),
        ({"begin_mask": 6, "ellipsis_mask": 1}, [1, 1, 1], None),
        ({"begin_mask": 3, "end_mask": 3}, [-1, 1], None),
        ({"begin_mask": 2, "end_mask": 3}, [1, 1], None),
    ],
    ids=["[:, :1]", "[..., :1]", "[..., newaxis, :1]", "[..., :1, :1]", "[::-1, :]", "[1:, :]"],
)
def test_a_slice_that_takes_all_samples_holds_rows(masks: dict[str, int], strides: list[int], rows: int | None) -> None:
    graphs = []
    for n in (8, 2):
        builder = GraphBuilder()
        x = builder.argument((n, 4))
        definition = node_def_pb2.NodeDef(name="slice", op="StridedSlice")
        for name, mask in masks.items():
            definition.attr[name].i = mask
        begin, end = constant_of(builder, [1] * len(strides)), constant_of(builder, [9] * len(strides))
        by = constant_of(builder, strides)
        given = {"shape": (n, 1), "definition": definition.SerializeToString()}
        graphs.append(builder.graph(builder.add("StridedSlice", x, begin, end, by, **given)))  # type: ignore[arg-type]
    assert SampleRows(*graphs, 8).of(graphs[0].outputs[0]).rows == rows


@pytest.mark.parametrize(("of_part", "rows"), [("Fill", 0), ("Const", 0), ("ZerosLike", 0), ("OnesLike", None)])
def test_large_zeros_in_the_shape_of_the_samples_are_rows(of_part: str, rows: int | None) -> None:
    graphs = []
    for n, op in ((8, "Fill"), (2, of_part)):
        builder = GraphBuilder()
        x, zero = builder.argument((n, 3)), constant(builder, ())
        inputs = {"Fill": (constant_of(builder, [n, 3]), zero), "Const": ()}.get(op, (x,))
        definition = builder.nodes[constant(builder, (n, 3)).node].definition if op == "Const" else b""
        builder.add(op, *inputs, shape=(n, 3), definition=definition)
        builder.nodes[-1] = dataclasses.replace(builder.nodes[-1], name="zeros")
        graphs.append(builder.graph(Tensor(len(builder.nodes) - 1, 0)))
    assert SampleRows(*graphs, 8).of(graphs[0].outputs[0]).rows == rows


def penalty(n: int, *, is_mean: bool) -> tuple[OpGraph, Tensor]:
    """The gradient of a layer's outputs by its inputs: of each row by its own, or of their mean."""
    builder = GraphBuilder()
    x, kernel = builder.argument((n, 4)), builder.variable("net/kernel", (4, 3))
    call = builder.call("net/dense")
    weights = builder.read(kernel, call)
    outputs = builder.add("MatMul", x, weights, call=call, shape=(n, 3))
    begin = builder.add("Mean", outputs, shape=()) if is_mean else outputs
    seed = builder.add("OnesLike", begin, forward_of=begin, shape=() if is_mean else (n, 3))
    if is_mean:
        share = builder.add("RealDiv", seed, builder.add("Sum", outputs, shape=()), forward_of=begin, shape=())
        seed = builder.add("Tile", share, forward_of=begin, shape=(n, 3))
    slopes = builder.add("MatMul", seed, weights, call=call, forward_of=outputs, shape=(n, 4))
    return builder.graph(slopes), slopes


@pytest.mark.parametrize("is_mean", [False, True])
def test_a_gradient_by_samples_is_a_row_each_where_nothing_mixes_them(is_mean: bool) -> None:
    (whole, slopes), (part, _) = penalty(8, is_mean=is_mean), penalty(2, is_mean=is_mean)
    tail = find_tail(whole, SampleRows(whole, part, 8), {"slopes": (slopes,)})
    assert [(cut.whole, cut.axis) for cut in tail.cuts] == ([] if is_mean else [(slopes, 0)])
    assert dict(tail.left_out) == ({"slopes": "it depends on gradients"} if is_mean else {})


def test_all_that_one_microbatch_computes_is_that_of_the_batch() -> None:
    whole, variance, normal = layer(8)
    rows = OneMicrobatch(SampleRows(whole, whole, 8), whole)
    assert [rows.of(tensor).rows for tensor in (variance, normal)] == [0, 0]
    tail = find_tail(whole, rows, {"variance": (variance,)})
    assert [cut.whole for cut in tail.cuts] == [variance]
    assert tail.nodes == ()


@pytest.mark.parametrize(
    ("masks", "begin", "found"),
    [(({"begin_mask": 3}, {"begin_mask": 3}), (1, 1), True), (({"begin_mask": 3}, {"begin_mask": 1}), (1, 1), False)]
    + [(({"begin_mask": 1}, {"begin_mask": 1}), begin, begin != (1, 2)) for begin in ((1, 1), (1, 2), (8, 2))],
)
def test_an_op_of_the_same_name_that_takes_something_else_is_another(
    masks: tuple[dict[str, int], ...], begin: tuple[int, ...], found: bool
) -> None:
    """A number of samples, 8 or 2 here, may differ."""
    graphs = []
    for n, mask, first in zip((8, 2), masks, begin, strict=True):
        builder = GraphBuilder()
        definition = node_def_pb2.NodeDef(name="slice", op="StridedSlice")
        definition.attr["begin_mask"].i = mask["begin_mask"]
        inputs = [constant_of(builder, numbers) for numbers in ([0, first], [9, 9], [1, 1])]
        given = {"shape": (n, 1), "definition": definition.SerializeToString()}
        graphs.append(builder.graph(builder.add("StridedSlice", builder.argument((n, 4)), *inputs, **given)))  # type: ignore[arg-type]
    assert (SampleRows(*graphs, 8).in_part(graphs[0].outputs[0]) is not None) == found
