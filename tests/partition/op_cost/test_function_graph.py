"""The body of a function has, as a graph of its own, the types of one call of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from smp_tf.partition.graph.op_graph import ARGUMENT, SOURCES, OpGraph, TensorType
from smp_tf.partition.op_cost.function_graph import function_graph
from smp_tf.partition.split.split import Segment, Visit
from smp_tf.partition.split.working_set import segment_memory
from smp_tf.partition.units.cost import node_seconds
from tests.partition.traced_step import step_graph

SAMPLES, WIDTH, TRIPS = 4, 3, 5
MATRIX = TensorType("float32", (SAMPLES, WIDTH))


def body(function: Callable[..., Any], *specs: Any, given: tuple[TensorType, ...], trips: int = TRIPS) -> OpGraph:
    """The graph of a function that was traced with types that say less than those it is given now."""
    traced = tf.function(function, autograph=False).get_concrete_function(*specs)
    library = traced.graph.as_graph_def().library
    definition = library.function.add()
    definition.CopyFrom(traced.function_def)
    results = tuple(TensorType(t.dtype.name, None) for t in traced.outputs)
    return function_graph(library.SerializeToString(), definition.signature.name, given, results, trips)


def kinds(graph: OpGraph, op: str) -> list[TensorType]:
    return [node.outputs[0] for node in graph.nodes if node.op == op]


def test_types_are_those_of_the_arguments() -> None:
    def function(x: tf.Tensor, y: tf.Tensor) -> Any:
        first, second = tf.split(tf.matmul(x, y), 2, axis=1)
        return second, first

    graph = body(function, *[tf.TensorSpec([None, None])] * 2, given=(MATRIX, TensorType("float32", (WIDTH, 8))))
    graph.validate()
    assert [node.op for node in graph.nodes[:2]] == [ARGUMENT, ARGUMENT]
    assert kinds(graph, "MatMul") == [TensorType("float32", (SAMPLES, 8))]
    assert [graph.type_of(tensor) for tensor in graph.outputs] == [TensorType("float32", (SAMPLES, 4))] * 2
    # The second half comes first: both are outputs of one op.
    split = next(number for number, node in enumerate(graph.nodes) if node.op == "Split")
    sources = [graph.nodes[tensor.node].inputs[0] for tensor in graph.outputs]
    assert [(source.node, source.index) for source in sources] == [(split, 1), (split, 0)]


def test_an_order_of_axes_that_is_an_argument_moves_as_much_as_it_takes() -> None:
    def function(x: tf.Tensor, axes: tf.Tensor) -> tf.Tensor:
        return tf.exp(tf.transpose(x, axes))

    specs = [tf.TensorSpec([None, None]), tf.TensorSpec([2], tf.int32)]
    graph = body(function, *specs, given=(MATRIX, TensorType("int32", (2,))))
    assert [kind.nbytes(1000) for kind in kinds(graph, "Transpose")] == [SAMPLES * WIDTH * 4]


def test_a_variable_has_its_shape_and_lists_have_as_many_entries_as_the_loop_has_turns() -> None:
    variable = tf.Variable(tf.zeros([WIDTH, WIDTH]))

    def function(x: tf.Tensor, times: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            _, y = tf.while_loop(lambda i, _: i < times, lambda i, y: (i + 1, tf.tanh(tf.matmul(y, variable))), (0, x))
        return tape.gradient(y, x)

    specs = [tf.TensorSpec([SAMPLES, WIDTH]), tf.TensorSpec([], tf.int32)]
    handle = TensorType("resource", (), TensorType("float32", (WIDTH, WIDTH)))
    graph = body(function, *specs, given=(MATRIX, TensorType("int32", ()), handle), trips=7)
    lists = [kind for node in graph.nodes for kind in node.outputs if kind.entry and kind.entries]
    assert lists
    assert {kind.entries for kind in lists} == {7}
    assert TensorType("float32", (SAMPLES, WIDTH)) in {kind.entry for kind in lists}


def test_zeros_like_a_list_are_a_list() -> None:
    entry = TensorType("float32", (SAMPLES, WIDTH))

    def function(handle: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.TensorListLength(input_handle=tf.zeros_like(handle))

    graph = body(function, tf.TensorSpec([], tf.variant), given=(TensorType("variant", (), entry, 6),))
    assert [kind.nbytes() for kind in kinds(graph, "ZerosLike")] == [6 * SAMPLES * WIDTH * 4]


def loop_in_loop(x: tf.Tensor) -> tf.Tensor:
    def turn(i: tf.Tensor, y: tf.Tensor) -> Any:
        return i + 1, tf.cond(i > 1, lambda: tf.exp(y), lambda: tf.map_fn(tf.tanh, y))

    return tf.while_loop(lambda i, _: i < 3, turn, (0, x))[1]


def growing(x: tf.Tensor) -> tf.Tensor:
    open_rows = (tf.TensorShape([None, WIDTH]),)
    return tf.while_loop(lambda y: tf.shape(y)[0] < 9, lambda y: (tf.concat([y, y], 0),), (x,), open_rows)[0]


def list_of_any_shape(x: tf.Tensor) -> tf.Tensor:
    made = tf.TensorArray(tf.float32, 0, dynamic_size=True, infer_shape=False)
    return tf.while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, a.write(i, x)), (0, made))[1].concat()


def python_function(x: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(
        lambda i, _: i < 2,
        lambda i, y: (i + 1, tf.ensure_shape(tf.numpy_function(lambda v: v, [y], tf.float32), y.shape)),
        (0, x),
    )[1]


@pytest.mark.parametrize("function", [loop_in_loop, growing, list_of_any_shape, python_function])
@pytest.mark.parametrize("rows", [SAMPLES, None])
def test_bodies_of_every_kind_are_looked_into(function: Callable[[tf.Tensor], tf.Tensor], rows: int | None) -> None:
    """A forecast must not end a training where TensorFlow can infer little of a function."""
    graph = step_graph(function, tf.TensorSpec([rows, WIDTH]))
    numbers = tuple(n for n, node in enumerate(graph.nodes) if node.op not in SOURCES)
    cut = Segment(Visit(0, 0), numbers, (), (), (), graph.outputs)
    most = segment_memory(graph, cut, node_seconds(graph), (), SAMPLES).working.bytes
    assert SAMPLES * WIDTH * 4 <= most < 100 * SAMPLES * WIDTH * 4
