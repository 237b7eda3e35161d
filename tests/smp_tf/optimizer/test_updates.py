"""Which updates of an optimizer wait for which, seen from the graph; that results are the same; and what stays free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import networkx as nx
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras import optimizers

from smp_tf.optimizer import updates
from smp_tf.optimizer.patch import OptimizerPatch
from smp_tf.optimizer.updates import most_at_once
from smp_tf.replicas.gradient_marks import Computed, mark

COUNT = 6
#: A square matrix of so many rows is just large.
SIDE = 256


@pytest.fixture(autouse=True)
def _patched() -> Iterator[None]:
    """Optimizers as a distributed model makes them."""
    patch = OptimizerPatch()
    patch.install()
    yield
    patch.remove()


def weights(count: int = COUNT, side: int = SIDE) -> list[tf.Variable]:
    return [tf.Variable(tf.fill([side, side], 1.0 + n), name=f"weight_{n}") for n in range(count)]


def graph_of(
    optimizer: Any, variables: Sequence[tf.Variable], change: Callable[[Any, int], Any] = lambda g, n: g
) -> Any:
    """The function in which an optimizer changes variables, given a gradient for each."""
    getattr(optimizer, "build", lambda variables: None)(variables)

    @tf.function(autograph=False)
    def apply(gradients: list[tf.Tensor]) -> None:
        optimizer.apply_gradients(
            [(change(g, n), v) for n, (g, v) in enumerate(zip(gradients, variables, strict=True))]
        )

    return apply.get_concrete_function([tf.TensorSpec(v.shape, v.dtype) for v in variables])


def order(graph: Any) -> nx.DiGraph:
    """What waits for what."""
    found = nx.DiGraph()
    for operation in graph.get_operations():
        found.add_node(operation.name)
        found.add_edges_from((t.op.name, operation.name) for t in operation.inputs)
        found.add_edges_from((before.name, operation.name) for before in operation.control_inputs)
    assert nx.is_directed_acyclic_graph(found)
    return found


def ends(graph: Any, variables: Sequence[tf.Variable]) -> list[int]:
    """Numbers of the ops that write weights last, in the order of the weights."""
    inside = {id(given): held.name for given, held in graph.captures}
    names = [inside[id(variable.handle)] for variable in variables]
    operations = graph.get_operations()
    return [
        max(
            number
            for number, operation in enumerate(operations)
            if operation.type.startswith("Assign") and name in [t.name for t in operation.inputs]
        )
        for name in names
    ]


def large_between(graph: Any, first: int, last: int) -> list[str]:
    """The ops between two others that make something large."""
    return [
        operation.name
        for operation in graph.get_operations()[first + 1 : last]
        if operation.type != "ReadVariableOp" and any(t.shape == (SIDE, SIDE) for t in operation.outputs)
    ]


def waits(graph: Any, variables: Sequence[tf.Variable]) -> list[list[int]]:
    """For each weight but the first, those whose updates all of its large ops wait for."""
    waiting, at = order(graph), ends(graph, variables)
    operations = graph.get_operations()
    found = []
    for first, last in pairwise(at):
        own = large_between(graph, first, last)
        assert own
        before = set.intersection(*(nx.ancestors(waiting, name) for name in own))
        found.append([n for n, end in enumerate(at) if operations[end].name in before])
    return found


OPTIMIZERS = {
    "adam": lambda: optimizers.Adam(0.1),
    "adamw": lambda: optimizers.AdamW(0.1),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "lion": lambda: optimizers.Lion(0.1),
    "adafactor": lambda: optimizers.Adafactor(0.1),
    "clipped by norm": lambda: optimizers.Adam(0.1, clipnorm=1.0),
    "clipped together": lambda: optimizers.Adam(0.1, global_clipnorm=1.0),
    "averaged": lambda: optimizers.RMSprop(0.1, use_ema=True),
}
#: Ops that are a whole update make nothing besides.
ALL = {**OPTIMIZERS, "legacy": lambda: optimizers.legacy.Adam(0.1)}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_at_most_two_weights_are_updated_at_a_time(init: Callable[..., None], make: Callable[[], Any]) -> None:
    init(microbatches=2)
    variables = weights()
    assert waits(graph_of(make(), variables).graph, variables) == [[], [0], [1], [0, 2], [1, 3]]


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_the_result_is_the_same(init: Callable[..., None], make: Callable[[], Any]) -> None:
    init(microbatches=2)
    variables, expected = weights(), weights()
    apply, optimizer = graph_of(make(), variables), make()
    for step in range(2):
        gradients = [tf.fill([SIDE, SIDE], 0.1 * (n + 1 + step)) for n in range(COUNT)]
        apply(gradients)
        optimizer.apply_gradients(zip(gradients, expected, strict=True))
    for one, other in zip(variables, expected, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5)


def test_updates_in_a_branch_wait_too(init: Callable[..., None]) -> None:
    """A `LossScaleOptimizer` updates where gradients are finite."""
    init(microbatches=2)
    variables = weights()
    graph = graph_of(tf_keras.mixed_precision.LossScaleOptimizer(optimizers.Adam(0.1)), variables).graph
    names = [
        name
        for op in graph.get_operations()
        if op.type in ("If", "StatelessIf")
        for name in [op.get_attr("then_branch").name]
    ]
    operations = {n.name: n for n in _nodes_of(graph, names)}
    updates = [n for n in operations if "AssignSub" in n]
    assert len(updates) == COUNT
    assert sum(f"^{update}" in list(n.input) for update in updates for n in operations.values()) >= COUNT - 2


def _nodes_of(graph: Any, names: Sequence[str]) -> list[Any]:
    library = graph.as_graph_def().library.function
    return [node for function in library if function.signature.name in names for node in function.node_def]


def test_an_eighth_of_all_may_be_under_way(init: Callable[..., None]) -> None:
    """Many threads have something to do where there are many weights."""
    init(microbatches=2)
    variables = weights(33)
    found = waits(graph_of(optimizers.Adam(0.1), variables).graph, variables)
    assert found[:6] == [[], [], [], [0], [1], [2]]
    assert found[-1] == list(range(0, 29, 4))


@pytest.mark.parametrize("side", [SIDE - 1, 2])
def test_small_weights_wait_for_nothing(init: Callable[..., None], side: int) -> None:
    init(microbatches=2)
    variables = weights(side=side)
    graph = graph_of(optimizers.Adam(0.1), variables).graph
    waiting, operations = order(graph), graph.get_operations()
    names = [operations[end].name for end in ends(graph, variables)]
    assert not any(nx.has_path(waiting, one, other) for one in names for other in names if one != other)


def test_buckets_do_not_wait_for_each_other(init: Callable[..., None]) -> None:
    """Even and odd weights are in two buckets of gradients, of which one may be averaged much later."""
    init(microbatches=2)

    def of_bucket(gradient: tf.Tensor, number: int) -> tf.Tensor:
        average = tf.identity(gradient)
        return mark(average, computed=Computed(average.op, number % 2))

    variables = weights(8)
    graph = graph_of(optimizers.Adam(0.1), variables, of_bucket).graph
    assert waits(graph, variables) == [[], [], [], [0], [1], [2], [3]]


def test_a_bucket_of_few_weights_is_not_taken_for_another_ones_update(init: Callable[..., None]) -> None:
    """Bug: the ops of weights that wait for nothing were taken for those of the next one that waits."""
    init(microbatches=2)

    def of_bucket(gradient: tf.Tensor, number: int) -> tf.Tensor:
        average = tf.identity(gradient)
        return mark(average, computed=Computed(average.op, int(number in (4, 6))))

    variables = weights(9)
    graph = graph_of(optimizers.Adam(0.1), variables, of_bucket).graph
    waiting, operations = order(graph), graph.get_operations()
    names = [operations[end].name for end in ends(graph, variables)]
    assert not any(nx.has_path(waiting, other, names[n]) for n in (4, 6) for other in names if other != names[n])


@pytest.mark.parametrize("side", [2, SIDE])
def test_a_graph_for_sessions_stays_as_it_is(init: Callable[..., None], side: int) -> None:
    """Bug: it has no captures, and applying gradients in it failed."""
    init(microbatches=2)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variables = [tf.compat.v1.get_variable(f"w{n}", [side, side], use_resource=True) for n in range(4)]
        optimizer = optimizers.legacy.SGD(tf.constant(1.0))
        update = optimizer.apply_gradients([(tf.ones([side, side]), variable) for variable in variables])
        session.run([variable.initializer for variable in (*variables, *optimizer.variables())])
        before = session.run(variables)
        session.run(update)
        for old, new in zip(before, session.run(variables), strict=True):
            np.testing.assert_allclose(new, old - 1.0, rtol=1e-6)


def test_what_is_made_of_averages_may_come_one_by_one() -> None:
    at_once = tf.ones([1])
    with tf.Graph().as_default() as graph:
        changed = [(tf.zeros([1]) * 2.0, name) for name in "ab"]
        known = mark(tf.zeros([1]), computed=Computed(tf.no_op(), 3))
        pairs = [*changed, (known, "c")]
        assert list(updates._groups(pairs, graph, replicas=1)) == [["a", "b"], ["c"]]
        assert list(updates._groups(pairs, graph, replicas=2)) == [["c"]]
        # What is no part of the graph is there.
        assert list(updates._groups([(at_once, "a")], graph, replicas=2)) == [["a"]]
    with tf.Graph().as_default() as branch:
        # So is all that a branch is given when it begins.
        assert list(updates._groups(pairs, branch, replicas=2)) == [["a", "b", "c"]]


def test_where_nothing_is_split_the_graph_is_plain_keras(init: Callable[..., None]) -> None:
    plain = [op.node_def for op in graph_of(optimizers.Adam(0.1), weights()).graph.get_operations()]
    init(microbatches=1)
    ours = [op.node_def for op in graph_of(optimizers.Adam(0.1), weights()).graph.get_operations()]
    assert [(node.op, sorted(node.input)) for node in ours] == [(node.op, sorted(node.input)) for node in plain]


def test_the_bytes_under_way_are_those_of_the_largest_two_or_of_an_eighth_and_all_small_ones() -> None:
    assert most_at_once([]) == 0
    assert most_at_once([100, 200]) == 300
    assert most_at_once([1 << 20] * 16) == 2 << 20
    assert most_at_once([1 << 20] * 80) == 10 << 20
    assert most_at_once([4 << 20, 3 << 20, 2 << 20, 100]) == (7 << 20) + 100
