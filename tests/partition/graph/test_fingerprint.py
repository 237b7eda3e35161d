"""Whether two traces are the same step."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

from smp_tf.partition.graph.fingerprint import difference, fingerprint, outline, work_of
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.units.units import build_units
from tests.partition.op_graph_builder import GraphBuilder, chain_of_dense


def changed(graph: OpGraph, number: int, **fields: object) -> OpGraph:
    nodes = list(graph.nodes)
    nodes[number] = dataclasses.replace(nodes[number], **fields)  # type: ignore[arg-type]
    return dataclasses.replace(graph, nodes=tuple(nodes))


def test_the_same_step_has_the_same_fingerprint() -> None:
    assert fingerprint(chain_of_dense(2)) == fingerprint(chain_of_dense(2))
    assert len(fingerprint(chain_of_dense(2))) == 64
    assert difference(outline(chain_of_dense(2)), outline(chain_of_dense(2))) == ""


def test_names_of_ops_do_not_count() -> None:
    graph = chain_of_dense(1)
    assert fingerprint(changed(graph, 3, name="another")) == fingerprint(graph)


@pytest.mark.parametrize("other", [chain_of_dense(3), chain_of_dense(2, width=16), chain_of_dense(2, batch=5)])
def test_another_step_has_another_fingerprint(other: OpGraph) -> None:
    assert fingerprint(other) != fingerprint(chain_of_dense(2))


def test_another_op_is_named_with_its_layer() -> None:
    graph = chain_of_dense(2)
    relu = next(n for n, node in enumerate(graph.nodes) if node.op == "Relu")
    other = changed(graph, relu, op="Elu")
    assert difference(outline(graph), outline(other), "rank 0", "rank 3") == (
        "The first difference: rank 0 has op Relu giving float32[4,8] in layer 'net/dense_0', "
        "rank 3 has op Elu giving float32[4,8] in layer 'net/dense_0'."
    )


def test_another_shape_is_named() -> None:
    said = difference(outline(chain_of_dense(1)), outline(chain_of_dense(1, batch=6)), "rank 0", "rank 1")
    assert said == (
        "The first difference: rank 0 has op SmpArgument giving float32[4,8] outside every layer, "
        "rank 1 has op SmpArgument giving float32[6,8] outside every layer."
    )


def test_another_variable_is_named() -> None:
    graph = chain_of_dense(1)
    frozen = dataclasses.replace(graph.variables[0], trainable=False)
    other = dataclasses.replace(graph, variables=(frozen,))
    assert difference(outline(graph), outline(other)) == (
        "The first difference: this rank has variable 'net/dense_0/kernel' of type float32[8,8], "
        "trainable, of the model, "
        "the other has variable 'net/dense_0/kernel' of type float32[8,8], not trainable, of the "
        "model."
    )


def test_other_inputs_are_told_from_another_op() -> None:
    graph = chain_of_dense(2)
    last = max(n for n, node in enumerate(graph.nodes) if node.op == "MatMul")
    swapped = changed(graph, last, inputs=graph.nodes[last].inputs[::-1])
    said = difference(outline(graph), outline(swapped), "rank 0", "rank 1")
    assert "is there on both rank 0 and rank 1, but with other inputs, attributes or constants" in said
    assert "op MatMul" in said


def test_one_step_that_goes_on() -> None:
    lines = outline(chain_of_dense(1))
    assert difference(lines, lines[:-1], "rank 0", "rank 1") == (
        "The steps are alike up to the end of one; rank 0 goes on with 1 results."
    )


_STEP = """
import os
import sys
import tensorflow as tf
from smp_tf.partition.graph.op_graph import Call, Node, OpGraph, Tensor, TensorType
from smp_tf.partition.graph.fingerprint import fingerprint


def traced(before, factor):
    # Other functions before it: other running numbers in generated names.
    for _ in range(before):
        tf.function(lambda x: tf.while_loop(lambda i: i < 3, lambda i: i + 1, [x]))(tf.constant(0))

    @tf.function
    def inner(x):
        return tf.nn.dropout(tf.tanh(x) * factor, 0.5)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.while_loop(lambda i, x: i < 4, lambda i, x: (i + 1, inner(x)), [0, x])[1]
        return tape.gradient(y, x)

    graph = tf.function(step).get_concrete_function(tf.TensorSpec([2, 3])).graph
    operations = graph.get_operations()
    numbers = {op.name: n for n, op in enumerate(operations)}
    definition = graph.as_graph_def()
    nodes = tuple(
        Node(
            op.name, op.type,
            tuple(Tensor(numbers[t.op.name], t.value_index) for t in op.inputs), (),
            tuple(TensorType(t.dtype.name, None) for t in op.outputs),
            op.node_def.SerializeToString(),
        )
        for op in operations
    )
    library = definition.library.SerializeToString()
    return fingerprint(OpGraph(nodes, (Call(0, "", "", None),), (), (), (), library))


# A process each, which has traced nothing before; TensorFlow is imported once.
for before, factor in ((0, 2.0), (3, 2.0), (0, 3.0)):
    if os.fork() == 0:
        print(traced(before, factor), flush=True)
        os._exit(0)
    if os.wait()[1] != 0:
        sys.exit("the trace failed")
"""


def test_generated_function_names_and_seeds_do_not_count_but_their_bodies_do() -> None:
    pytest.importorskip("tensorflow")
    done = subprocess.run(
        [sys.executable, "-c", _STEP],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    here, with_others_before, with_another_body = done.stdout.split()
    assert with_others_before == here
    assert with_another_body != here


def test_units_that_do_the_same_have_the_same_work_wherever_they_are() -> None:
    graph = chain_of_dense(4)
    units = build_units(graph)
    found = work_of(graph, ((*unit.nodes, *unit.backward) for unit in units))
    # Nothing waits for a gradient of the first layer's input. The last unit is the loss.
    letters = {work: "abc"[number] for number, work in enumerate(dict.fromkeys(found))}
    assert [letters[work] for work in found] == ["a", "b", "b", "b", "c"]


def test_work_differs_with_an_attribute_or_a_type() -> None:
    from tensorflow.core.framework import attr_value_pb2, node_def_pb2

    def work(other: bool, width: int) -> str:
        transposed = attr_value_pb2.AttrValue(b=other)
        definition = node_def_pb2.NodeDef(op="MatMul", attr={"transpose_b": transposed}).SerializeToString()
        builder = GraphBuilder()
        x = builder.argument((8, width))
        y = builder.add("MatMul", x, x, shape=(8, 8), definition=definition)
        return work_of(builder.graph(y), [[y.node]])[0]

    assert work(True, 4) == work(True, 4)
    assert len({work(True, 4), work(False, 4), work(True, 8)}) == 3
