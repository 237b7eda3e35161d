"""Segments as GraphDefs: what they hold, and that they compute what the step computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.grappler import tf_optimizer

from smp_tf.partition import tf_internals
from smp_tf.partition.graph.op_graph import ARGUMENT, VARIABLE, OpGraph, Tensor
from smp_tf.partition.split.segment_graph import remote_value_name, segment_graph, tensor_name, use_name
from smp_tf.partition.split.split import Segment, Visit
from tests.partition.op_graph_builder import GraphBuilder
from tests.partition.traced_step import FLOATS, lowered, of_type, step_graph

X = np.linspace(-1.0, 1.0, 32, dtype=np.float32).reshape(4, 8)


def all_of(graph: OpGraph, nodes: Any = None, inputs: tuple[Tensor, ...] = ()) -> Segment:
    """A segment of all ops, or of the given ones."""
    numbers = range(len(graph.nodes)) if nodes is None else nodes
    run = tuple(n for n in numbers if graph.nodes[n].definition)
    sources = tuple(n for n in numbers if not graph.nodes[n].definition)
    return Segment(Visit(0, 0), run, sources, inputs, (), graph.outputs)


def text(definition: graph_pb2.GraphDef) -> list[str]:
    """A node a line: its name, its type and its inputs."""
    return [f"{n.name} {n.op}({', '.join(n.input)})" for n in definition.node]


def run(definition: graph_pb2.GraphDef, given: Mapping[str, Any], wanted: list[str]) -> list[np.ndarray]:
    """Import into a function, which captures what is given, and call it."""
    called = tf_internals.KeptFunctions(definition.library.function)

    @tf.function(autograph=False)
    def imported() -> Any:
        graph = tf_internals.current_graph()
        inputs = {name: tf_internals.capture(graph, tensor) for name, tensor in given.items()}
        return tf.graph_util.import_graph_def(definition, input_map=inputs, return_elements=wanted, name="")

    found = [t.numpy() for t in imported()]
    del called
    return found


def written_node(b: GraphBuilder, op: str, *inputs: Tensor, control: tuple[int, ...] = ()) -> Tensor:
    """A node that a segment writes."""
    return b.add(op, *inputs, control=control, definition=node_def_pb2.NodeDef(op=op).SerializeToString())


def outputs(graph: OpGraph) -> list[str]:
    return [tensor_name(graph, t) for t in graph.outputs]


# --- what it holds --------------------------------------------------------------------------------------------------


def hand_made() -> tuple[OpGraph, dict[str, int]]:
    """x ─▶ Neg ─▶ (kept elsewhere) AddV2 with the value of w, after a control edge from each side of the cut."""
    b = GraphBuilder()

    def definition(op: str, **colocated: str) -> bytes:
        made = node_def_pb2.NodeDef(name="stale", op=op, input=["stale:0", "^stale"])
        made.attr["T"].type = 1
        for name in colocated.values():
            made.attr["_class"].list.s.append(f"loc:@{name}".encode())
        return bytes(made.SerializeToString())

    x = b.argument()
    w = b.variable("w", (4, 8))
    first = b.add("Neg", x, definition=definition("Neg"))
    outside = b.add("Abs", x, definition=definition("Abs"))
    read = b.add("ReadVariableOp", w, reads=(0,), shape=(4, 8), definition=definition("ReadVariableOp"))
    last = b.add(
        "AddV2",
        first,
        read,
        control=(first.node, outside.node, read.node),
        definition=definition("AddV2", other="Neg_2"),
    )
    return b.graph(last), {"first": first.node, "outside": outside.node, "read": read.node, "last": last.node}


def test_inputs_are_written_anew_and_edges_to_ops_outside_the_segment_go() -> None:
    graph, at = hand_made()
    written = segment_graph(graph, all_of(graph, [0, 1, at["first"], at["read"], at["last"]]), owned=[0])
    assert text(written) == [
        "Neg_2 Neg(SmpArgument_0:0)",
        "ReadVariableOp_4 ReadVariableOp(SmpVariable_1:0)",
        "AddV2_5 AddV2(Neg_2:0, ReadVariableOp_4:0, ^Neg_2, ^ReadVariableOp_4)",
    ]
    assert all("_class" not in node.attr and node.attr["T"].type == 1 for node in written.node)


def test_a_read_of_another_stages_weight_is_the_value_that_is_fed_in() -> None:
    graph, at = hand_made()
    written = segment_graph(graph, all_of(graph, [0, at["first"], at["read"], at["last"]]), owned=[])
    assert remote_value_name(graph, 0) == "smp_remote_value_0:0"
    assert text(written) == [
        "Neg_2 Neg(SmpArgument_0:0)",
        "AddV2_5 AddV2(Neg_2:0, smp_remote_value_0:0, ^Neg_2)",  # nothing waits for a read that is gone
    ]


def test_a_received_tensor_is_a_name() -> None:
    graph, at = hand_made()
    written = segment_graph(graph, all_of(graph, [at["last"]]), owned=[0])
    assert text(written) == ["AddV2_5 AddV2(Neg_2:0, ReadVariableOp_4:0)"]


def test_what_waits_for_a_product_waits_for_the_makers_of_its_factors() -> None:
    b = GraphBuilder()

    def add(op: str, *inputs: Tensor, control: tuple[int, ...] = ()) -> Tensor:
        return written_node(b, op, *inputs, control=control)

    x = b.argument()
    made = add("MatMul", x, x)
    product = add("Mul", add("AddV2", made, x), made)
    early = add("Mul", x, x)
    waits = add("Square", x, control=(product.node, early.node))
    graph = b.graph(waits)
    lines = text(segment_graph(graph, all_of(graph), owned=[]))
    # Nothing that makes a factor of the second one is in the segment.
    assert lines[-1] == "Square_5 Square(SmpArgument_0:0, ^MatMul_1, ^Mul_4)"
    lines = text(segment_graph(graph, all_of(graph, [0, 3, 4, 5]), owned=[]))
    assert lines[-1] == "Square_5 Square(SmpArgument_0:0, ^Mul_3, ^Mul_4)"


def test_what_a_product_waits_for_is_waited_for_with_it() -> None:
    """A counter rose although the check before the product that it waited for had failed."""
    b = GraphBuilder()
    x = b.argument()
    check = written_node(b, "Assert", x)
    product = written_node(b, "Mul", written_node(b, "Tanh", x), x, control=(check.node,))
    graph = b.graph(written_node(b, "Square", x, control=(product.node,)))
    lines = text(segment_graph(graph, all_of(graph), owned=[]))
    assert lines[-1] == "Square_4 Square(SmpArgument_0:0, ^Tanh_2, ^Assert_1)"


def test_a_product_of_what_is_given_is_waited_for_itself() -> None:
    b = GraphBuilder()
    x, w = b.argument(), b.variable("w", (4, 8))
    definition = node_def_pb2.NodeDef(op="ReadVariableOp").SerializeToString()
    read = b.add("ReadVariableOp", w, reads=(0,), shape=(4, 8), definition=definition)
    number = written_node(b, "Const")
    product = written_node(b, "Mul", written_node(b, "Mul", x, read), number)
    graph = b.graph(written_node(b, "Square", x, control=(product.node,)))
    lines = text(segment_graph(graph, all_of(graph), owned=[]))
    assert lines[-1] == "Square_6 Square(SmpArgument_0:0, ^Mul_5)"


def test_a_sum_through_a_whole_model_is_waited_for_itself() -> None:
    """Otherwise there are as many edges as the square of its layers."""
    b = GraphBuilder()
    x = b.argument()
    total = x
    for _ in range(100):
        total = written_node(b, "AddV2", total, written_node(b, "MatMul", x, x))
        written_node(b, "Square", x, control=(total.node,))
    graph = b.graph(total)
    edges = [line.count("^") for line in text(segment_graph(graph, all_of(graph), owned=[]))]
    assert sum(edges) < 10 * 100
    assert edges[-1] == 1


def test_gradients_wait_also_after_constant_folding() -> None:
    """All of a stage's layers computed what their gradients read when backward began: 10 % of what a rank held."""
    weights = [tf.Variable(tf.ones([8, 8])) for _ in range(3)]

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            for w in weights:
                x = tf.nn.gelu(x @ w)
            loss = tf.reduce_sum(x)
        return tape.gradient(loss, weights)

    graph = step_graph(step, FLOATS)
    body = segment_graph(graph, all_of(graph), owned=[])
    with tf.Graph().as_default() as folded:
        given = {
            tensor_name(graph, Tensor(number, 0)): tf.compat.v1.placeholder(tf.float32, node.outputs[0].shape)
            for number, node in enumerate(graph.nodes)
            if node.op == ARGUMENT
        }
        given.update({remote_value_name(graph, v): tf.compat.v1.placeholder(tf.float32, [8, 8]) for v in range(3)})
        made = tf.graph_util.import_graph_def(body, input_map=given, return_elements=outputs(graph), name="")
        for tensor in made:
            tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.TRAIN_OP, tensor)
        exported = tf.compat.v1.train.export_meta_graph(graph=folded)
        optimized = tf_optimizer.OptimizeGraph(config_pb2.ConfigProto(), exported)
    waits = {n.name: [name for name in n.input if name.startswith("^")] for n in optimized.node if n.op == "Square"}
    # The last layer's are given ones.
    assert waits == {
        "gradient_tape/Gelu_2/Square": [],
        "gradient_tape/Gelu_1/Square": ["^gradient_tape/matmul_2/MatMul"],
        "gradient_tape/Gelu/Square": ["^gradient_tape/matmul_1/MatMul"],
    }


def test_only_the_functions_that_are_called_come_along_with_those_they_call() -> None:
    def inner(h: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda i, _: i < 2, lambda i, h: (i + 1, tf.tanh(h)), [0, h])[1]

    def step(x: tf.Tensor) -> Any:
        nested = tf.cond(tf.reduce_sum(x) > 0, lambda: inner(x), lambda: x)
        other = tf.cond(tf.reduce_sum(x) > 1, lambda: tf.sinh(x), lambda: x)
        return nested, other

    graph = step_graph(step, FLOATS)
    first, second = (graph.number_of[n.name] for n in graph.nodes if n.op in ("If", "StatelessIf"))

    def functions(nodes: list[int]) -> set[str]:
        written = segment_graph(graph, all_of(graph, nodes), owned=[])
        return {n.op for f in written.library.function for n in f.node_def} & {"Tanh", "Sinh"}

    assert functions([first]) == {"Tanh"}
    assert functions([second]) == {"Sinh"}
    assert functions([first, second]) == {"Tanh", "Sinh"}
    assert functions([n for n, node in enumerate(graph.nodes) if node.op == "Sum"]) == set()


# --- what it computes -----------------------------------------------------------------------------------------------


def test_a_segment_computes_what_the_step_computes() -> None:
    w = tf.Variable(tf.reshape(tf.range(64.0), [8, 8]) / 640.0)

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loop = tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, tf.tanh(h)), [0, tf.matmul(x, w)])[1]
            loss = tf.cond(tf.reduce_sum(loop) > 0, lambda: tf.reduce_sum(loop), lambda: tf.reduce_mean(loop))
        return loss, tape.gradient(loss, w)

    graph = step_graph(step, FLOATS)
    (argument,) = of_type(graph, ARGUMENT)
    (handle,) = of_type(graph, VARIABLE)
    given = {f"{argument.name}:0": tf.constant(X), f"{handle.name}:0": w.handle}
    loss, gradient = run(segment_graph(graph, all_of(graph), owned=[0]), given, outputs(graph))
    wanted_loss, wanted_gradient = tf.function(step)(tf.constant(X))
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-6)
    np.testing.assert_allclose(gradient, wanted_gradient, rtol=1e-5, atol=1e-6)
    assert np.abs(gradient).max() > 0


def test_the_pieces_of_a_cut_graph_compute_what_the_whole_computes() -> None:
    w = tf.Variable(tf.eye(8) * 3.0)
    graph = step_graph(lambda x: tf.tanh(tf.matmul(tf.nn.relu(x), w)), FLOATS)
    (argument,) = of_type(graph, ARGUMENT)
    (handle,) = of_type(graph, VARIABLE)
    cut = graph.number_of[of_type(graph, "Relu")[0].name]
    before, after = range(cut + 1), [n for n in range(cut + 1, len(graph.nodes)) if graph.nodes[n].definition]
    boundary = tensor_name(graph, Tensor(cut, 0))
    (relu,) = run(segment_graph(graph, all_of(graph, before), [0]), {f"{argument.name}:0": tf.constant(X)}, [boundary])
    given = {boundary: tf.constant(relu), f"{handle.name}:0": w.handle}
    (result,) = run(segment_graph(graph, all_of(graph, after), owned=[0]), given, outputs(graph))
    np.testing.assert_allclose(result, np.tanh(np.maximum(X, 0) * 3.0), rtol=1e-6)


def shape_of(w: tf.Variable, dtype: tf.DType) -> tf.Tensor:
    """As the gradient of a gather asks for it, which a read of the variable comes before."""
    w.read_value()
    return tf.raw_ops.VariableShape(input=w.handle, out_type=dtype)


@pytest.mark.parametrize(
    ("reader", "op"),
    [
        (lambda w, ids: tf.matmul(w, tf.eye(8)), "ReadVariableOp"),
        (lambda w, ids: tf.gather(w, ids), "ResourceGather"),
        (lambda w, ids: tf.gather_nd(w, ids[:, tf.newaxis]), "ResourceGatherNd"),
        (lambda w, ids: shape_of(w, tf.int32), "VariableShape"),
        (lambda w, ids: shape_of(w, tf.int64), "VariableShape"),
    ],
)
@pytest.mark.parametrize("is_in_parts", [False, True])
def test_a_weight_elsewhere_or_in_parts_is_read_from_the_value_that_is_fed_in(
    reader: Any, op: str, is_in_parts: bool
) -> None:
    """The variable itself holds other numbers, so a read of it would show."""
    own = tf.Variable(tf.zeros([20, 8]))
    table = np.random.default_rng(1).normal(size=[20, 8]).astype(np.float32)
    ids = np.array([3, 0, 19, 3], np.int32)
    result = lowered(lambda x, ids: reader(own, ids), FLOATS, tf.TensorSpec([4], tf.int32))
    graph = result.graph
    assert len(of_type(graph, op)) == 1
    uses = tuple(number for number, node in enumerate(graph.nodes) if node.reads)
    if is_in_parts:
        written = segment_graph(graph, dataclasses.replace(all_of(graph), uses=uses), owned=[0])
    else:
        written = segment_graph(graph, all_of(graph), owned=[])
    assert op not in {node.op for node in written.node}
    mapped = {
        **{use_name(graph, number): tf.constant(table) for number in uses},
        remote_value_name(graph, 0): tf.constant(table),
        f"{of_type(graph, ARGUMENT)[1].name}:0": tf.constant(ids),
    }
    read_names = {i if ":" in i else f"{i}:0" for node in written.node for i in node.input}
    (got,) = run(written, {k: v for k, v in mapped.items() if k in read_names}, outputs(graph))
    wanted = reader(tf.Variable(table), tf.constant(ids))
    np.testing.assert_array_equal(got, wanted)
    assert got.dtype == wanted.numpy().dtype
    assert np.any(got)


def test_a_gather_with_batch_dimensions_gathers_along_the_next_axis() -> None:
    own = tf.Variable(tf.zeros([2, 5]))
    table = np.arange(10, dtype=np.float32).reshape(2, 5)
    ids = np.array([[4, 0, 1], [2, 2, 3]], np.int32)

    def gather(w: tf.Variable, ids: Any) -> Any:
        w.read_value()
        return tf.raw_ops.ResourceGather(resource=w.handle, indices=ids, dtype=tf.float32, batch_dims=1)

    graph = lowered(lambda ids: gather(own, ids), tf.TensorSpec([2, 3], tf.int32)).graph
    written = segment_graph(graph, all_of(graph), owned=[])
    given = {remote_value_name(graph, 0): tf.constant(table), f"{of_type(graph, ARGUMENT)[0].name}:0": tf.constant(ids)}
    (got,) = run(written, given, outputs(graph))
    assert got.tolist() == [[4.0, 0.0, 1.0], [7.0, 7.0, 8.0]]


def test_effects_of_a_segment_keep_their_order() -> None:
    count = tf.Variable(1.0)

    def step(x: tf.Tensor) -> Any:
        before = count.read_value()
        count.assign(before * 3.0)
        between = count.read_value()
        count.assign_add(4.0)
        return before, between, count.read_value()

    graph = step_graph(step, FLOATS)
    handle = of_type(graph, VARIABLE)[0]
    written = segment_graph(graph, all_of(graph), owned=[0])
    assert run(written, {f"{handle.name}:0": count.handle}, outputs(graph)) == [1.0, 3.0, 7.0]
    assert count.numpy() == 7.0
