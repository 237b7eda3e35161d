"""Random ops become functions of a seed: in the graph, in functions, in loops, and again in recomputation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_keras import layers

from smp_tf.partition import tf_internals
from smp_tf.partition.graph.op_graph import ARGUMENT, SEED, SOURCES, OpGraph, Tensor, TensorType
from smp_tf.partition.rewrite.randomness import make_stateless
from smp_tf.partition.split.segment_graph import segment_graph
from smp_tf.partition.split.split import Segment, Visit
from tests.partition.traced_step import FLOATS, lowered, of_type

ONES = np.ones([4, 8], np.float32)
SEEDS = [(7, 0), (7, 1), (8, 0), (0, 1 << 40)]


def nothing_said(sentence: str) -> None:
    raise AssertionError(sentence)


def stateless(step: Callable[..., Any], models: Any = ()) -> OpGraph:
    return make_stateless(lowered(step, FLOATS, models=models).graph, nothing_said)


def runner(graph: OpGraph) -> Callable[[tuple[int, int]], list[np.ndarray]]:
    """A function of the seed that runs the graph on ones and gives its outputs."""
    nodes = tuple(n for n, node in enumerate(graph.nodes) if node.op not in SOURCES)
    sources = tuple(n for n, node in enumerate(graph.nodes) if node.op in SOURCES)
    assert {graph.nodes[n].op for n in sources} <= {ARGUMENT, SEED}
    definition = segment_graph(graph, Segment(Visit(0, 0), nodes, sources, (), (), graph.outputs), ())
    called = tf_internals.KeptFunctions(definition.library.function)
    given = {f"{graph.nodes[n].name}:0": graph.nodes[n].op for n in sources}
    wanted = [f"{graph.nodes[t.node].name}:{t.index}" for t in graph.outputs]

    @tf.function(input_signature=[tf.TensorSpec([2], tf.int64)])
    def run(seed: tf.Tensor) -> Any:
        inputs = {name: tf.constant(ONES) if op == ARGUMENT else seed for name, op in given.items()}
        used = {i if ":" in i else f"{i}:0" for node in definition.node for i in node.input}
        mapped = {name: tensor for name, tensor in inputs.items() if name in used}
        return tf.graph_util.import_graph_def(definition, input_map=mapped, return_elements=wanted, name="")

    def run_with(seed: tuple[int, int]) -> list[np.ndarray]:
        assert called is not None
        return [t.numpy() for t in run(tf.constant(seed, tf.int64))]

    return run_with


# --- which ops ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draw", "op"),
    [
        (lambda x: tf.random.uniform(tf.shape(x)), "StatelessRandomUniform"),
        (lambda x: tf.random.normal([4, 8], dtype=tf.float64), "StatelessRandomNormal"),
        (lambda x: tf.random.truncated_normal([4, 8]), "StatelessTruncatedNormal"),
        (lambda x: tf.random.uniform([40], 0, 1000, tf.int32), "StatelessRandomUniformInt"),
        (lambda x: tf.random.categorical(x, 40), "StatelessMultinomial"),
    ],
)
def test_every_kind_is_a_function_of_the_seed(draw: Callable[..., Any], op: str) -> None:
    before = lowered(draw, FLOATS).graph
    graph = make_stateless(before, nothing_said)
    (node,) = of_type(graph, op)
    assert not node.stateful
    # The draw's type and shape are what they were.
    assert [graph.type_of(t) for t in graph.outputs] == [before.type_of(t) for t in before.outputs]
    run = runner(graph)
    drawn = [run(seed)[0] for seed in SEEDS]
    assert all(np.array_equal(run(seed)[0], first) for seed, first in zip(SEEDS, drawn, strict=True))
    for i, one in enumerate(drawn):
        assert len(np.unique(one)) > 4
        assert not any(np.array_equal(one, other) for other in drawn[:i])


def test_the_seed_node_comes_first_and_each_op_adds_its_number_to_it() -> None:
    graph = stateless(lambda x: (tf.random.uniform([3]), tf.random.normal([3])))
    assert (graph.nodes[0].op, graph.nodes[0].outputs) == (SEED, (TensorType("int64", (2,)),))
    assert len(of_type(graph, SEED)) == 1
    offsets = []
    for op in ("StatelessRandomUniform", "StatelessRandomNormal"):
        (node,) = of_type(graph, op)
        add = graph.nodes[node.inputs[1].node]
        assert (add.op, add.inputs[0], add.call) == ("AddV2", Tensor(0, 0), node.call)
        definition = tf.compat.v1.NodeDef()
        definition.ParseFromString(graph.nodes[add.inputs[1].node].definition)
        offsets.append(tf.make_ndarray(definition.attr["value"].tensor).tolist())
    # Masks must not change between versions: these numbers are part of what a checkpoint means.
    assert offsets == [[4073552104164651883, 0], [1990071630548588925, 0]]


def test_a_graph_without_random_ops_is_returned_as_it_is() -> None:
    def step(x: tf.Tensor) -> Any:
        return tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, tf.tanh(h)), [0, x])[1]

    graph = lowered(step, FLOATS).graph
    assert make_stateless(graph, nothing_said) is graph


def test_what_has_no_counterpart_keeps_its_state_and_is_said_once() -> None:
    said: list[str] = []
    graph = lowered(lambda x: (tf.random.shuffle(x), tf.random.shuffle(x), tf.random.gamma([2], 1.0)), FLOATS).graph
    assert make_stateless(graph, said.append) is graph
    assert [sentence.split(" has no counter-based")[0] for sentence in said] == [
        "Random op RandomGamma",
        "Random op RandomShuffle",
    ]


def test_what_has_no_counterpart_inside_a_loop_is_said_too() -> None:
    said: list[str] = []

    def step(x: tf.Tensor) -> Any:
        return tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, tf.random.shuffle(h)), [0, x])[1]

    make_stateless(lowered(step, FLOATS).graph, said.append)
    assert [sentence.split()[2] for sentence in said] == ["RandomShuffle"]


# --- layers ---------------------------------------------------------------------------------------------------------


def test_two_dropout_layers_get_different_masks() -> None:
    first, second = layers.Dropout(0.5), layers.Dropout(0.5)
    run = runner(stateless(lambda x: (first(x, training=True), second(x, training=True))))
    a, b = run((7, 0))
    assert not np.array_equal(a, b)
    assert all(0 < np.count_nonzero(mask) < 32 for mask in (a, b))
    assert not np.array_equal(run((7, 1))[0], a)  # another microbatch


def test_backward_uses_the_mask_of_forward() -> None:
    drop = layers.Dropout(0.5)

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = drop(x, training=True)
        return y, tape.gradient(y, x)

    y, gradient = runner(stateless(step))((7, 0))
    assert np.array_equal(y, gradient)  # of ones: both are the mask
    assert 0 < np.count_nonzero(y) < 32


def test_recomputation_draws_the_same_mask_again() -> None:
    """A part of the graph that is run once more, elsewhere and alone, draws what it drew within the whole."""
    first, second = layers.Dropout(0.5), layers.Dropout(0.5)
    whole = stateless(lambda x: (first(x, training=True), tf.exp(second(tf.abs(x), training=True))))
    part = dataclasses.replace(whole, outputs=whole.outputs[1:])
    part = part.subgraph(part.ancestors([whole.outputs[1].node]))
    assert len(part.nodes) < len(whole.nodes)
    for seed in SEEDS:
        assert np.array_equal(runner(part)(seed)[0], runner(whole)(seed)[1])


# --- functions ------------------------------------------------------------------------------------------------------


def test_a_branch_draws_by_the_seed() -> None:
    def step(x: tf.Tensor) -> Any:
        branch = tf.cond(tf.reduce_sum(x) > 0, lambda: tf.random.uniform([16]), lambda: tf.zeros([16]))
        return branch, tf.random.uniform([16])

    run = runner(stateless(step))
    branch, outside = run((7, 0))
    assert np.array_equal(run((7, 0))[0], branch)
    assert not np.array_equal(run((7, 1))[0], branch)
    assert not np.array_equal(outside, branch)


def test_draws_of_different_calls_differ_whatever_their_numbers_within() -> None:
    """Bug: numbers were added up, and the second draw of the first branch was the first draw of the second branch."""

    def two() -> Any:
        return tf.random.uniform([8]), tf.random.uniform([8])

    def step(x: tf.Tensor) -> Any:
        alike = [tf.cond(tf.reduce_sum(x) > limit, two, lambda: (x[0], x[0])) for limit in (0.0, 1.0)]
        return alike, two()

    drawn = np.stack(runner(stateless(step))((7, 0)))
    assert drawn.shape == (6, 8)
    assert len(np.unique(drawn)) == drawn.size


def test_draws_in_nested_loops_differ_in_every_turn_of_both() -> None:
    """Bug: turns were added up, and turn 1 in turn 2 drew what turn 2 in turn 1 draws."""

    def inner(i: tf.Tensor, drawn: tf.Tensor) -> Any:
        return i + 1, tf.concat([drawn, tf.random.uniform([1])], 0)

    def outer(i: tf.Tensor, drawn: tf.Tensor) -> Any:
        return i + 1, tf.while_loop(lambda j, _: j < 3, inner, [0, drawn], shape_invariants=shapes)[1]

    shapes = [tf.TensorShape([]), tf.TensorShape([None])]
    step = lambda x: tf.while_loop(lambda i, _: i < 3, outer, [0, x[0, :0]], shape_invariants=shapes)[1]  # noqa: E731
    drawn = runner(stateless(step))((7, 0))[0]
    assert drawn.shape == (9,)
    assert len(np.unique(drawn)) == 9


def test_every_turn_of_a_loop_draws_anew_by_the_seed() -> None:
    def step(x: tf.Tensor) -> Any:
        def turn(i: tf.Tensor, drawn: tf.Tensor) -> Any:
            two = tf.stack([tf.random.uniform([]), tf.random.uniform([])])
            return i + 1, tf.concat([drawn, two], 0)

        shapes = [tf.TensorShape([]), tf.TensorShape([None])]
        return tf.while_loop(lambda i, _: i < 4, turn, [0, tf.zeros([0])], shape_invariants=shapes)[1]

    graph = stateless(step)
    run = runner(graph)
    drawn = run((7, 0))[0]
    assert drawn.shape == (8,)
    assert len(np.unique(drawn)) == 8
    assert np.array_equal(run((7, 0))[0], drawn)
    assert not np.intersect1d(run((7, 1))[0], drawn).size


def test_a_loop_in_a_branch_in_a_loop_draws_by_the_seed() -> None:
    def inner(h: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda i, _: i < 2, lambda i, h: (i + 1, h + tf.random.uniform([8])), [0, h])[1]

    def step(x: tf.Tensor) -> Any:
        def turn(i: tf.Tensor, h: tf.Tensor) -> Any:
            return i + 1, tf.cond(i > 0, lambda: inner(h), lambda: h)

        return tf.while_loop(lambda i, _: i < 3, turn, [0, x])[1]

    run = runner(stateless(step))
    assert np.array_equal(run((7, 0))[0], run((7, 0))[0])
    assert not np.array_equal(run((7, 1))[0], run((7, 0))[0])
    assert np.all(run((7, 0))[0] > 1.0)


def test_the_gradient_of_a_loop_that_draws_uses_what_was_drawn() -> None:
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            body: Any = lambda i, h: (i + 1, h * tf.random.uniform([4, 8], 0.5, 2.0))  # noqa: E731
            y = tf.while_loop(lambda i, _: i < 3, body, [0, x])[1]
        return y, tape.gradient(y, x)

    y, gradient = runner(stateless(step))((7, 0))
    np.testing.assert_allclose(y, gradient, rtol=1e-6)  # the product of the factors, as x is one
    assert len(np.unique(y)) > 30


def test_a_function_that_is_called_whole_draws_by_the_seed_anew_in_every_call() -> None:
    whole = tf.function(lambda x: tf.nn.dropout(x, 0.5), experimental_attributes={"_noinline": True})
    graph = stateless(lambda x: (whole(x), whole(x)))
    calls = [n for n in graph.nodes if "Call" in n.op]
    assert len(calls) == 2
    run = runner(graph)
    first, second = run((7, 0))
    assert np.array_equal(run((7, 0))[0], first)
    assert not np.array_equal(first, second)  # two calls, two masks
    assert not np.array_equal(run((7, 1))[0], first)


def test_inputs_and_outputs_of_a_loop_that_draws_grow_by_the_seed_and_nothing_else_changes() -> None:
    def step(x: tf.Tensor) -> Any:
        return tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, h + tf.random.uniform([4, 8])), [0, x])[1]

    before = lowered(step, FLOATS).graph
    after = make_stateless(before, nothing_said)
    (old,) = [n for n in before.nodes if "While" in n.op]
    (new,) = [n for n in after.nodes if "While" in n.op]
    assert len(new.inputs) == len(old.inputs) + 1
    assert new.outputs == (*old.outputs, TensorType("int64", (2,)))
    assert after.type_of(after.outputs[0]) == before.type_of(before.outputs[0])
    assert len(after.nodes) == len(before.nodes) + 3  # the seed, the loop's offset and its sum
