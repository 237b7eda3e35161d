"""Sums over the replicas within a segment: what stands for one is written as sends, receives and a sum."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from smp_tf.ops import send_recv
from smp_tf.ops.replica_sum import sum_over_replicas
from smp_tf.partition.graph.op_graph import OpGraph, TensorType
from smp_tf.partition.graph.op_kinds import SUM_OVER_REPLICAS
from smp_tf.pipeline.run.replica_sums import (
    PASSED,
    ReplicaEnds,
    ReplicaSum,
    give_nothing,
    passed_specs,
    replica_sums,
    written_out,
)
from tests.partition.op_graph_builder import GraphBuilder

ENDS = ReplicaEnds(program=99, ranks=(1, 3, 5), own=1, most=4)


def definition() -> tf.compat.v1.GraphDef:
    """A sum of `x`, and one of gradients that waits for it."""

    def body(x: tf.Tensor) -> Any:
        total = sum_over_replicas(x, "moments of norm")
        with tf.control_dependencies([total]):
            return sum_over_replicas(x, "moments of norm", weighed=True)

    graph = tf.function(body).get_concrete_function(tf.TensorSpec([3], tf.float64, name="x")).graph.as_graph_def()
    first, second = (node for node in graph.node if node.op == SUM_OVER_REPLICAS)
    first.name, second.name = "first", "second"
    second.input[1] = "^first"
    found = tf.compat.v1.GraphDef(versions=graph.versions)
    found.node.extend([first, second])
    return found


SUMS = [ReplicaSum(number, number, name, TensorType("float64", (3,))) for number, name in ((4, "first"), (5, "second"))]


def lines(graph: tf.compat.v1.GraphDef) -> list[str]:
    return [f"{node.name} = {node.op}({', '.join(node.input)})" for node in graph.node]


def test_parts_are_sent_received_and_added_in_rank_order() -> None:
    written = written_out(definition(), SUMS, ENDS)
    passed = "smp_sum_step:0, smp_sum_microbatch:0"
    assert lines(written) == [
        "first/smp_own = Identity(x)",
        f"first/smp_to_0 = SmpSendInCall(first/smp_own:0, {passed})",
        f"first/smp_from_0 = SmpRecvInCall({passed}, ^first/smp_own)",
        f"first/smp_to_2 = SmpSendInCall(first/smp_own:0, {passed})",
        f"first/smp_from_2 = SmpRecvInCall({passed}, ^first/smp_own)",
        "first/smp_parts = Pack(first/smp_from_0:0, first/smp_own:0, first/smp_from_2:0)",
        "first/smp_axis = Const()",
        "first = Sum(first/smp_parts:0, first/smp_axis:0)",
        "second/smp_weight = Cast(smp_sum_weight:0)",
        "second/smp_own = Mul(x, second/smp_weight:0, ^first)",
        f"second/smp_to_0 = SmpSendInCall(second/smp_own:0, {passed})",
        f"second/smp_from_0 = SmpRecvInCall({passed}, ^second/smp_own)",
        f"second/smp_to_2 = SmpSendInCall(second/smp_own:0, {passed})",
        f"second/smp_from_2 = SmpRecvInCall({passed}, ^second/smp_own)",
        "second/smp_parts = Pack(second/smp_from_0:0, second/smp_own:0, second/smp_from_2:0)",
        "second/smp_axis = Const()",
        "second/smp_added = Sum(second/smp_parts:0, second/smp_axis:0)",
        "second = RealDiv(second/smp_added:0, second/smp_weight:0)",
    ]
    messages = [node.attr for node in written.node if "InCall" in node.op]
    assert [(m["program"].i, m["edge"].i, m["dest"].i or m["src"].i) for m in messages] == [
        (99, number, rank) for number in (4, 5) for rank in (1, 1, 5, 5)
    ]
    assert {m["label"].s for m in messages} == {b"moments of norm"}


def test_measured_alone_a_sum_is_what_one_replica_has() -> None:
    assert lines(written_out(definition(), SUMS, None)) == ["first = Identity(x)", "second = Identity(x, ^first)"]


def test_the_library_knows_the_ops_that_are_written() -> None:
    with tf.Graph().as_default():
        inputs = {"x:0": tf.zeros([3], tf.float64)}
        inputs |= {name: tf.zeros([], spec.dtype) for name, spec in zip(PASSED, passed_specs(), strict=True)}
        written = written_out(definition(), SUMS, ENDS)
        written.node[0].input[0] = written.node[9].input[0] = "x:0"
        first, second = tf.graph_util.import_graph_def(
            written, input_map=inputs, return_elements=["first:0", "second:0"], name=""
        )
        assert (first.shape, second.shape, second.dtype) == ((3,), (3,), tf.float64)


def graph_with_sums() -> OpGraph:
    builder = GraphBuilder()
    x = builder.argument()
    attributes = tf.compat.v1.NodeDef()
    attributes.attr["label"].s = b"moments"
    first = builder.add(SUM_OVER_REPLICAS, x, shape=(3,), definition=attributes.SerializeToString())
    second = builder.add("Square", first, shape=(3,))
    return builder.graph(builder.add(SUM_OVER_REPLICAS, second, shape=(2,), definition=attributes.SerializeToString()))


def test_sums_are_numbered_in_the_order_of_the_step() -> None:
    graph = graph_with_sums()
    assert [(each.number, graph.nodes[each.node].op, each.kind.shape) for each in replica_sums(graph)] == [
        (0, SUM_OVER_REPLICAS, (3,)), (1, SUM_OVER_REPLICAS, (2,)),
    ]  # fmt: skip


def test_zeros_are_given_for_microbatches_that_only_others_have(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = []

    def note(kind: str) -> Any:
        def add(*given: Any, **names: Any) -> Any:
            tensor = given[0] if kind == "send" else tf.zeros(given[2], given[1])
            noted.append((kind, names["dest" if kind == "send" else "src"], names["edge"], names["microbatch"]))
            assert not tensor.numpy().any()
            return tensor if kind == "receive" else None

        return add

    monkeypatch.setattr(send_recv, "send", note("send"))
    monkeypatch.setattr(send_recv, "recv", lambda *given, **names: _Made(note("receive")(*given, **names)))
    graph = graph_with_sums()
    give_nothing(graph, replica_sums(graph), ENDS, range(2, 4), tf.constant(0, tf.int64))
    assert noted == [
        (kind, rank, number, microbatch)
        for number in (0, 1)
        for microbatch in (2, 3)
        for rank in (1, 5)
        for kind in ("send", "receive")
    ]


class _Made:
    """A tensor with the op that made it."""

    def __init__(self, tensor: Any) -> None:
        self.op = tensor
