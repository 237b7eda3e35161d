"""A weight of which each replica keeps rows: each use is fed the whole value, and the gradient goes to the owners.

               replica 0                          replica 1
    keeps      rows 0, 1 of shared/kernel         rows 2, 3
    F0         gather ─▶ first use                gather ─▶ first use
               gather ─▶ second use               gather ─▶ second use
    B0         gather ─▶ gradient of its input    gather ─▶ gradient of its input
    ...
    gets       rows 0, 1 of the gradient's sum    rows 2, 3

Here one process stands for both, and gathers by putting the rows together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from smp_tf.partition.errors import PlacementError
from smp_tf.partition.layout import Layout
from smp_tf.partition.spread import EVERYWHERE, SplitOver, Whole
from smp_tf.pipeline.run.emission import CallersPart
from smp_tf.pipeline.run.executor import emit
from smp_tf.pipeline.run.stage_program import Endpoint, build_stage_program
from tests.pipeline.all_stages import PROGRAM, WIDTH, CutStep, cut_step

HALVES = SplitOver("D", 0, (0, 2, 4))
LAYOUTS = {"shared/kernel": Layout(0, 0, value=HALVES, gradient=HALVES, slots=HALVES)}
MICROBATCHES, SAMPLES = 2, 4


def training(stages: int = 1, layouts: Mapping[str, Layout] | None = None) -> CutStep:
    """A step whose first layer is called once more by its last."""
    shared = tf_keras.layers.Dense(WIDTH, activation="tanh", use_bias=False, name="shared")
    inputs = tf_keras.Input((WIDTH,))
    model = tf_keras.Model(inputs, shared(tf_keras.layers.Dense(WIDTH, name="between")(shared(inputs))), name="net")
    for number, variable in enumerate(model.variables):
        size = variable.shape.num_elements()
        variable.assign(tf.reshape(tf.linspace(-1.0, 0.5 + number, size), variable.shape))

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        return loss, tape.gradient(loss, model.trainable_variables)

    spec = tf.TensorSpec((SAMPLES // MICROBATCHES, WIDTH))
    return cut_step(step, [model], [spec], stages, MICROBATCHES, layouts=layouts)


def index_of(step: CutStep, name: str) -> int:
    return next(v.index for v in step.graph.variables if v.name == name)


def runner(
    step: CutStep, variables: Mapping[int, tf.Variable], gather: Callable[[int], tf.Tensor] | None = None
) -> Callable[[np.ndarray], list[np.ndarray]]:
    """What runs a step of one stage: its losses, and the sums of its gradients."""
    program = build_stage_program(step.split, step.program, Endpoint(PROGRAM, 0, (0,)), variables)

    @tf.function
    def run(x: tf.Tensor) -> Any:
        parts = tf.split(x, MICROBATCHES)
        seed = tf.zeros([2], tf.int64)
        found = emit(program, lambda _, m: parts[m], [], lambda _: seed, [1] * MICROBATCHES, CallersPart(gather=gather))
        return found.values[0], [total for total in found.accumulated if total is not None]

    return lambda x: [tensor.numpy() for tensor in tf.nest.flatten(run(tf.constant(x)))]


def reads(step: CutStep, numbers: tuple[int, ...]) -> list[str]:
    return [step.graph.nodes[number].name for number in numbers]


def test_a_value_is_whole_where_all_ranks_of_the_stage_have_all_of_it() -> None:
    assert Layout(0, 0).has_whole_value
    assert Layout(0, 0, value=EVERYWHERE, gradient=HALVES, slots=HALVES).has_whole_value
    assert not LAYOUTS["shared/kernel"].has_whole_value
    assert not Layout(0, 0, value=Whole("D", 0, 2)).has_whole_value


def test_each_use_is_an_input_in_place_of_a_read() -> None:
    step = training(layouts=LAYOUTS)
    forward, backward = (step.split.segments[0, sweep, 0] for sweep in (0, 1))
    first, second = "net/shared/MatMul/ReadVariableOp", "net/shared/MatMul_1/ReadVariableOp"
    assert sorted(reads(step, forward.uses)) == [first, second]
    # The first use has an input that needs no gradient.
    assert reads(step, backward.uses) == [second]
    for segment in (forward, backward):
        function = step.functions[segment.visit]
        assert function.takes.uses == segment.uses
        assert index_of(step, "shared/kernel") not in function.variables
        made = {op.name: op for op in function.function.graph.get_operations()}
        for name in reads(step, segment.uses):
            assert name not in made
        uses = [op for op in made.values() if op.type == "Placeholder" and op.name.startswith("smp_use_")]
        assert [op.outputs[0].shape.as_list() for op in uses] == [[WIDTH, WIDTH]] * len(segment.uses)
    whole = training()
    assert [segment.uses for segment in whole.split.segments.values()] == [()] * len(whole.split.segments)


def test_a_weight_in_parts_trains_like_the_whole_one() -> None:
    whole, parts = training(), training(layouts=LAYOUTS)
    kernel = index_of(whole, "shared/kernel")
    value = whole.variables[0][kernel].numpy()
    places = [{"P": 0, "D": replica, "T": 0} for replica in range(2)]
    rows = [slice(*HALVES.rows_at(place)) for place in places]
    halves = [tf.Variable(value[own]) for own in rows]
    asked: list[int] = []

    def gather(variable: int) -> tf.Tensor:
        asked.append(variable)
        return tf.concat([half.read_value() for half in halves], 0)

    replicas = [runner(parts, {**parts.variables[0], kernel: half}, gather) for half in halves]
    reference = runner(whole, whole.variables[0])
    batches = np.random.default_rng(3).normal(size=[2, SAMPLES, WIDTH]).astype(np.float32)
    layout = LAYOUTS["shared/kernel"]
    for _ in range(2):
        found = [run(batch) for run, batch in zip(replicas, batches, strict=True)]
        wanted = [reference(batch) for batch in batches]
        for got, expected in zip(found, wanted, strict=True):
            assert [tensor.shape for tensor in got] == [(), (), (4, 4), (4, 4), (4,)]
            for tensor, other in zip(got, expected, strict=True):
                np.testing.assert_array_equal(tensor, other)
        gradient = found[0][2] + found[1][2]
        for place, own, half in zip(places, rows, halves, strict=True):
            assert layout.receives_gradient(place)
            half.assign_sub(0.1 * gradient[own])
        whole.variables[0][kernel].assign_sub(0.1 * gradient)
    # Once for each use, of each microbatch, in the trace of each replica.
    assert asked == [kernel] * (2 + 1) * MICROBATCHES * 2


def test_another_stage_is_sent_the_whole_value() -> None:
    step = training(stages=2, layouts=LAYOUTS)
    kernel = index_of(step, "shared/kernel")
    [transfer] = [t for t in step.split.transfers if t.variable is not None]
    owner = step.split.stage_of_variable(kernel)
    assert (transfer.variable, transfer.src_chunk) == (kernel, owner)
    assert step.split.segments[transfer.dst_chunk, 0, 0].remote_values == (kernel,)
    assert step.split.segments[transfer.dst_chunk, 0, 0].uses == ()
    variables = step.variables[transfer.src_chunk]
    end = Endpoint(PROGRAM, transfer.src_chunk, (0, 1))
    program = build_stage_program(step.split, step.program, end, variables)
    seed = tf.zeros([2], tf.int64)

    def gather(variable: int) -> tf.Tensor:
        return tf.concat([variables[variable][:2], variables[variable][2:]], 0, name="gathered")

    @tf.function
    def run(x: tf.Tensor) -> Any:
        parts = tf.split(x, MICROBATCHES)
        emit(program, lambda _, m: parts[m], [], lambda _: seed, [1] * MICROBATCHES, CallersPart(gather=gather))

    graph = run.get_concrete_function(tf.TensorSpec([SAMPLES, WIDTH])).graph
    sent = [op.inputs[0].op.name for op in graph.get_operations() if op.type == "SmpSend"]
    assert [name for name in sent if name.startswith("gathered")]


def test_a_weight_in_parts_is_only_read() -> None:
    model = tf_keras.Sequential([tf_keras.layers.BatchNormalization(name="norm")])
    model.build((None, WIDTH))
    mean = {"norm/moving_mean": Layout(0, 0, value=HALVES)}

    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(model(x, training=True))

    with pytest.raises(PlacementError, match=r"needs the handle of 'norm/moving_mean', of which each rank has a part"):
        cut_step(step, [model], [tf.TensorSpec((2, WIDTH))], 1, 1, layouts=mean)
