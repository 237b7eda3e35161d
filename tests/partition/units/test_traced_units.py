"""Units, costs and cuts of real Keras models, as they are traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("tf_keras")

from smp_tf.partition.graph.op_graph import SOURCES, OpGraph  # noqa: E402
from smp_tf.partition.place.placement import Chain, Chunks  # noqa: E402
from smp_tf.partition.place.solve_chain import solve_chain  # noqa: E402
from smp_tf.partition.plan.plan import Plan, Terms, make_plan  # noqa: E402
from smp_tf.partition.trace.lower import lower  # noqa: E402
from smp_tf.partition.trace.trace import Recorder, trace  # noqa: E402
from smp_tf.partition.units.cost import estimate  # noqa: E402
from smp_tf.partition.units.units import AFTER_MODEL, Unit, build_units  # noqa: E402

layers = keras.layers


@contextlib.contextmanager
def tagged(recorder: Recorder, model: Any) -> Iterator[None]:
    """Announces the calls of the model and of every layer in it."""
    original = layers.Layer.__call__

    def announced(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if not recorder.in_call and layer is not model:
            return original(layer, *args, **kwargs)
        with recorder.call(layer.name, type(layer).__name__):
            return original(layer, *args, **kwargs)

    layers.Layer.__call__ = announced
    try:
        yield
    finally:
        layers.Layer.__call__ = original


def traced(model: Any, x: Any, y: Any) -> OpGraph:
    """One microbatch of a training step with a softmax loss."""
    model(x)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        return loss, tape.gradient(loss, model.trainable_variables)

    result = trace(
        step,
        [tf.TensorSpec(t.shape, t.dtype) for t in (x, y)],
        lambda body, tensors: body(*tensors),
        scopes=lambda recorder: tagged(recorder, model),
    )
    names = {id(v.handle): v.name for v in model.variables}
    lowered = lower(result, lambda v: (names.get(id(v.handle), v.name), id(v.handle) in names))
    graph = lowered.graph
    wanted = [t.node for t in graph.outputs] + [n for n, node in enumerate(graph.nodes) if node.stateful]
    return graph.subgraph(graph.ancestors(wanted))


def convolutional() -> tuple[Any, Any, Any]:
    model = keras.Sequential(
        [
            layers.Conv2D(4, 3, name="conv"),
            layers.BatchNormalization(name="norm"),
            layers.Dropout(0.5, name="drop"),
            layers.Flatten(name="flat"),
            layers.Dense(10, name="dense"),
        ],
        name="net",
    )
    return model, tf.zeros([2, 8, 8, 1]), tf.zeros([2], tf.int32)


class Tied(keras.Model):
    def __init__(self) -> None:
        super().__init__(name="net")
        self.table = layers.Embedding(50, 16, name="table")
        self.hidden = [layers.Dense(16, activation="relu", name=f"hidden_{i}") for i in range(4)]

    def call(self, ids: Any, training: bool = False) -> Any:
        x = self.table(ids)
        for hidden in self.hidden:
            x = x + hidden(x)
        return tf.matmul(x, self.table.embeddings, transpose_b=True)


def tied() -> tuple[Any, Any, Any]:
    return Tied(), tf.zeros([2, 6], tf.int32), tf.zeros([2, 6], tf.int32)


def recurrent() -> tuple[Any, Any, Any]:
    model = keras.Sequential(
        [
            layers.Embedding(50, 8, name="table"),
            layers.LSTM(8, return_sequences=True, name="lstm"),
            layers.GRU(8, name="gru"),
            layers.Dense(10, name="dense"),
        ],
        name="net",
    )
    return model, tf.zeros([2, 7], tf.int32), tf.zeros([2], tf.int32)


def branching() -> tuple[Any, Any, Any]:
    given = keras.Input([8])
    left = layers.Dense(16, name="left")(given)
    right = layers.Dense(16, name="right")(given)
    both = layers.Concatenate(name="both")([left, right])
    head = layers.Dense(10, name="head")(layers.Add(name="add")([both, layers.Dense(32, name="skip")(left)]))
    return keras.Model(given, head, name="net"), tf.zeros([2, 8]), tf.zeros([2], tf.int32)


MODELS: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
    "convolutional": convolutional,
    "tied": tied,
    "recurrent": recurrent,
    "branching": branching,
}


@pytest.fixture(scope="module", params=MODELS)
def step(request: pytest.FixtureRequest) -> tuple[str, OpGraph, tuple[Unit, ...]]:
    graph = traced(*MODELS[request.param]())
    return request.param, graph, build_units(graph)


def test_units_are_the_layers(step: tuple[str, OpGraph, tuple[Unit, ...]]) -> None:
    name, _, units = step
    expected = {
        "convolutional": ["conv", "norm", "drop", "flat", "dense"],
        "tied": ["table", "hidden_0", "hidden_1", "hidden_2", "hidden_3", None],
        "recurrent": ["table", "lstm", "gru", "dense"],
        "branching": ["left", "right", "both", "skip", "add", "head"],
    }[name]
    found = [u.name for u in units]
    assert found[-1] == AFTER_MODEL
    if name == "branching":  # Keras decides in which order branches run
        assert sorted(found[:-1]) == sorted(f"net/{layer}" for layer in expected)
    else:
        assert found[:-1] == [f"net/{layer}" if layer else "net" for layer in expected]


def test_every_forward_op_of_the_model_is_in_one_unit(
    step: tuple[str, OpGraph, tuple[Unit, ...]],
) -> None:
    _, graph, units = step
    placed = [n for u in units for n in (*u.nodes, *u.backward)]
    assert len(placed) == len(set(placed))
    for number, node in enumerate(graph.nodes):
        if node.call and not node.backward and node.op != "Const" and number not in placed:
            # What is left are functions of constants alone.
            assert not any(graph.nodes[a].op in SOURCES for a in graph.ancestors([number]))


def test_units_are_in_topological_order(step: tuple[str, OpGraph, tuple[Unit, ...]]) -> None:
    _, graph, units = step
    unit_of = {n: u.index for u in units for n in u.nodes}
    for number, index in unit_of.items():
        for tensor in graph.nodes[number].inputs:
            assert unit_of.get(tensor.node, 0) <= index


def test_gradients_are_made_in_the_unit_of_their_variable(
    step: tuple[str, OpGraph, tuple[Unit, ...]],
) -> None:
    _, graph, units = step
    backward_unit = {n: u.index for u in units for n in u.backward}
    users = {v: u.index for u in reversed(units) for v in u.variables}
    for gradient in graph.gradients:
        assert backward_unit[gradient.tensors[0].node] == users[gradient.variable], graph.variables[gradient.variable]


def test_costs_need_no_guess_and_all_stages_get_something(
    step: tuple[str, OpGraph, tuple[Unit, ...]],
) -> None:
    _, graph, units = step
    costs = estimate(graph, units, slots=2.0, microbatches=4)
    assert costs.defaulted == ()
    assert all(
        u.flops.forward > 0
        for u, unit in zip(costs.units, units, strict=True)
        if unit.variables and "table" not in unit.name
    )
    for stages in range(1, len(units) + 1):
        for objective in ("memory", "speed"):
            chain = Chain.of([u.name for u in units], costs, manual=[u.stage for u in units])
            solution = solve_chain(chain, stages, objective=objective, microbatches=4)
            assert all(b - a in (0, 1) for a, b in pairwise(solution.stage_of))
            plan = make_plan(
                graph,
                units,
                costs,
                solution,
                Terms(Chunks.one_each([min(stages - r, 4) for r in range(stages)]), 4, "interleaved", objective),
                fingerprint="",
            )
            assert Plan.from_json(plan.to_json()) == plan
            assert sum(row.units for row in plan.forecast) == len(units)


def test_between_the_layers_of_a_chain_one_tensor_crosses_each_way() -> None:
    graph = traced(*convolutional())
    units = build_units(graph)
    costs = estimate(graph, units)
    for cut in range(1, len(units)):
        crossing = [f for f in costs.flows if f.producer < cut <= f.consumers[-1] and not f.backward]
        back = [f for f in costs.flows if f.consumers[0] < cut <= f.producer and f.backward]
        assert (len(crossing), len(back)) == (1, 1), units[cut].name


def test_a_tied_weight_is_used_by_both_ends_and_its_gradient_is_no_flow() -> None:
    graph = traced(*tied())
    units = build_units(graph)
    costs = estimate(graph, units)
    table = next(w for w in costs.weights if len(w.users) > 1)
    assert [units[u].name for u in table.users] == ["net/table", "net"]
    last = table.users[-1]
    assert [f.nbytes for f in costs.flows if f.producer == last and f.backward] == [2 * 6 * 16 * 4]
