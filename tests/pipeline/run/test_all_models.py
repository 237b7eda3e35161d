"""Models of all shapes, cut and run stage by stage in one process, give what they give uncut, to the last bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

from smp_tf.partition.split.step_outputs import Delivery
from tests.pipeline.all_stages import (
    CutStep,
    assert_same,
)

pytestmark = pytest.mark.large

BATCH = 8


@dataclass(frozen=True)
class Case:
    """A step with its models and whole batches of its arguments.

    Attributes:
        function: the step, of tensors.
        models: the models it calls.
        arguments: one array an argument.
        options: what `assert_same` is told besides.
    """

    function: Callable[..., Any]
    models: Sequence[tf_keras.Model]
    arguments: Sequence[np.ndarray]
    options: dict[str, Any] = field(default_factory=dict)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape) + sum(shape)).normal(size=(BATCH, *shape)).astype("float32")


def tokens(length: int, vocabulary: int = 20) -> np.ndarray:
    return np.random.default_rng(1).integers(0, vocabulary, size=(BATCH, length)).astype("int32")


def squared_error(wanted: tf.Tensor, got: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.square(wanted - tf.cast(got, wanted.dtype)))


def cross_entropy(wanted: tf.Tensor, got: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(wanted, got))


def training(model: tf_keras.Model, *arguments: np.ndarray, loss: Any = squared_error, **options: Any) -> Case:
    """One forward and backward: loss, gradients and predictions of a model with one input and one target."""
    model(arguments[0][:2])

    def step(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            predictions = model(x, training=True)
            value = loss(y, predictions)
            if model.losses:
                value += tf.add_n(model.losses)
        gradients = tape.gradient(value, model.trainable_variables)
        return gradients, value, predictions

    return Case(step, [model], arguments, options)


# --- the models ---------------------------------------------------------------------------------------------------


def mlp() -> Case:
    model = tf_keras.Sequential([layers.Dense(16, "relu") for _ in range(5)] + [layers.Dense(3)])
    return training(model, normal(4), normal(3))


def cnn_with_batch_normalization() -> Case:
    model = tf_keras.Sequential(
        [
            layers.Conv2D(4, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Conv2D(8, 3),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPool2D(),
            layers.Flatten(),
            layers.Dense(5),
        ]
    )
    return training(model, normal(12, 12, 1), normal(5))


def batch_renormalization() -> Case:
    norm = layers.BatchNormalization
    model = tf_keras.Sequential(
        [layers.Dense(6), norm(renorm=True), layers.Dense(6), norm(renorm=True), layers.Dense(3)]
    )
    return training(model, normal(6), normal(3))


def u_net() -> Case:
    def conv(x: Any, filters: int) -> Any:
        return layers.Conv2D(filters, 3, padding="same", activation="relu")(x)

    image = tf_keras.Input((16, 16, 2))
    fine = conv(image, 4)
    middle = conv(layers.MaxPool2D()(fine), 8)
    coarse = conv(layers.MaxPool2D()(middle), 8)
    up = conv(layers.Concatenate()([layers.UpSampling2D()(coarse), middle]), 8)
    up = layers.Concatenate()([layers.UpSampling2D()(up), fine])
    return training(tf_keras.Model(image, layers.Conv2D(1, 1)(up)), normal(16, 16, 2), normal(16, 16, 1))


def lstm() -> Case:
    model = tf_keras.Sequential(
        [layers.LSTM(6, return_sequences=True), layers.LSTM(5), layers.Dense(4), layers.Dense(3)]
    )
    return training(model, normal(7, 4), normal(3))


def gru() -> Case:
    model = tf_keras.Sequential([layers.GRU(6, return_sequences=True), layers.GRU(5), layers.Dense(4), layers.Dense(3)])
    return training(model, normal(7, 4), normal(3))


def masked_recurrence() -> Case:
    model = tf_keras.Sequential(
        [
            layers.Embedding(20, 6, mask_zero=True),
            layers.Bidirectional(layers.SimpleRNN(4)),
            layers.Dense(4),
            layers.Dense(3),
        ]
    )
    return training(model, tokens(7), normal(3))


class Gpt(tf_keras.Model):
    """A decoder whose output layer is its token embedding."""

    def __init__(self, vocabulary: int = 20, length: int = 8, width: int = 16, blocks: int = 1) -> None:
        super().__init__()
        self.tokens = layers.Embedding(vocabulary, width)
        self.positions = layers.Embedding(length, width)
        self.attention = [layers.MultiHeadAttention(2, 8) for _ in range(blocks)]
        self.before = [layers.LayerNormalization() for _ in range(blocks)]
        self.between = [layers.LayerNormalization() for _ in range(blocks)]
        self.wide = [layers.Dense(4 * width, activation="gelu") for _ in range(blocks)]
        self.narrow = [layers.Dense(width) for _ in range(blocks)]
        self.last = layers.LayerNormalization()
        self.length = length

    def call(self, x: Any, training: Any = None) -> Any:
        h = self.tokens(x) + self.positions(tf.range(self.length))
        for before, attention, between, wide, narrow in zip(
            self.before, self.attention, self.between, self.wide, self.narrow, strict=True
        ):
            q = before(h)
            h = h + attention(q, q, use_causal_mask=True)
            h = h + narrow(wide(between(h)))
        return tf.matmul(self.last(h), self.tokens.embeddings, transpose_b=True)


def tied_gpt() -> Case:
    return training(Gpt(), tokens(8), tokens(8), loss=cross_entropy)


class Twice(tf_keras.Model):
    """Calls one layer twice, with another in between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = layers.Dense(6, "tanh"), layers.Dense(6, "tanh"), layers.Dense(3)

    def call(self, x: Any, training: Any = None) -> Any:
        return self.c(self.a(self.b(self.a(x))))


def layer_called_twice() -> Case:
    return training(Twice(), normal(6), normal(3))


def two_inputs_two_outputs() -> Case:
    left, right = tf_keras.Input((4,)), tf_keras.Input((5,))
    a, b = layers.Dense(8, "relu")(left), layers.Dense(8, "relu")(right)
    both = layers.Dense(3)(layers.Concatenate()([a, b]))
    model = tf_keras.Model([left, right], [both, layers.Dense(2)(layers.Dense(4)(a))])

    def step(x1: Any, x2: Any, y1: Any, y2: Any) -> Any:
        with tf.GradientTape() as tape:
            p1, p2 = model([x1, x2], training=True)
            loss = squared_error(y1, p1) + squared_error(y2, p2)
        return tape.gradient(loss, model.trainable_variables), loss, {"first": p1, "second": p2}

    return Case(step, [model], [normal(4), normal(5), normal(3), normal(2)])


def embedding_and_penalties() -> Case:
    """Sparse gradients, a kernel's and an activity's regularizer."""
    model = tf_keras.Sequential(
        [
            layers.Embedding(20, 6, input_length=8),
            layers.Flatten(),
            layers.Dense(8, "relu", kernel_regularizer="l2"),
            layers.Dense(8, activity_regularizer="l2"),
            layers.Dense(3),
        ]
    )
    return training(model, tokens(8), normal(3))


class Penalised(layers.Dense):
    """Adds a loss of its own."""

    def call(self, x: Any) -> Any:
        y = super().call(x)
        self.add_loss(0.1 * tf.reduce_mean(tf.square(y)))
        return y


def add_loss_and_frozen_layer() -> Case:
    model = tf_keras.Sequential([Penalised(6), layers.Dense(6), Penalised(6), layers.Dense(3)])
    model.layers[1].trainable = False
    return training(model, normal(6), normal(3))


@tf.custom_gradient
def _sine_with_steep_gradient(x: tf.Tensor) -> Any:
    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        return upstream * tf.cos(x) * 2.0

    return tf.sin(x), gradient


def custom_gradient() -> Case:
    def sine() -> Any:
        return layers.Lambda(_sine_with_steep_gradient)

    model = tf_keras.Sequential([layers.Dense(6), sine(), layers.Dense(6), sine(), layers.Dense(3)])
    return training(model, normal(6), normal(3))


class Control(tf_keras.Model):
    """A branch and a loop over layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = layers.Dense(6, "tanh"), layers.Dense(6)
        self.c, self.d = layers.Dense(6), layers.Dense(3)

    def call(self, x: Any, training: Any = None) -> Any:
        x = self.a(x)
        x = tf.cond(tf.reduce_sum(x) > 0, lambda: self.b(x), lambda: x * 2.0)
        _, x = tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(self.c(h))), [0, x])
        return self.d(x)


def cond_and_while() -> Case:
    return training(Control(), normal(6), normal(3))


class TracedInside(tf_keras.Model):
    """Calls a layer through a tf.function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = layers.Dense(6, "tanh"), layers.Dense(6, "tanh")
        self.c, self.d = layers.Dense(6), layers.Dense(3)

    def call(self, x: Any, training: Any = None) -> Any:
        return self.d(self.c(self.inner(self.a(x))))

    @tf.function
    def inner(self, x: tf.Tensor) -> tf.Tensor:
        return self.b(x) * 2.0


def nested_function() -> Case:
    return training(TracedInside(), normal(6), normal(3))


class Counting(tf_keras.Model):
    """Assigns variables of its own in `call`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = layers.Dense(6, "tanh"), layers.Dense(6), layers.Dense(3)
        self.calls = tf.Variable(0, trainable=False, dtype=tf.int64)
        self.mean = tf.Variable(tf.zeros(6), trainable=False)

    def call(self, x: Any, training: Any = None) -> Any:
        self.calls.assign_add(1)
        x = self.a(x)
        self.mean.assign(self.mean * 0.9 + 0.1 * tf.reduce_mean(x, 0))
        return self.c(self.b(x - self.mean) * tf.cast(self.calls, tf.float32))


def assignments_in_call() -> Case:
    return training(Counting(), normal(6), normal(3))


class Gathering(tf_keras.Model):
    """Reads one weight by rows and by its shape, on stages far apart."""

    def __init__(self) -> None:
        super().__init__()
        self.table = self.add_weight("table", (20, 6))
        self.a, self.b, self.c = layers.Dense(6), layers.Dense(6), layers.Dense(3)

    def call(self, x: Any, training: Any = None) -> Any:
        h = self.a(tf.gather(self.table, x))
        h = self.b(h) / tf.cast(tf.shape(self.table)[0], tf.float32)
        return self.c(tf.reduce_mean(h + tf.gather(self.table, x), 1))


def gathers() -> Case:
    return training(Gathering(), tokens(5), normal(3))


def spectral_normalization() -> Case:
    norm = layers.SpectralNormalization
    model = tf_keras.Sequential([norm(layers.Dense(6)), layers.Dense(6), norm(layers.Dense(6)), layers.Dense(3)])
    return training(model, normal(6), normal(3))


def mixed_bfloat16() -> Case:
    before = tf_keras.mixed_precision.global_policy()
    tf_keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        model = tf_keras.Sequential([layers.Dense(16, "relu") for _ in range(5)] + [layers.Dense(3, dtype="float32")])
        return training(model, normal(4), normal(3))
    finally:
        tf_keras.mixed_precision.set_global_policy(before)


def float64() -> Case:
    model = tf_keras.Sequential([layers.Dense(6, "tanh", dtype="float64") for _ in range(4)])
    return training(model, normal(6).astype("float64"), normal(6).astype("float64"))


def resnet50() -> Case:
    model = tf_keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=10)
    return training(model, normal(32, 32, 3)[:4], normal(10)[:4])


def mobilenet_v2() -> Case:
    model = tf_keras.applications.MobileNetV2(weights=None, input_shape=(32, 32, 3), classes=10)
    for layer in model.layers:
        if isinstance(layer, layers.Dropout):
            layer.rate = 0.0
    return training(model, normal(32, 32, 3)[:4], normal(10)[:4])


# --- steps that do more than one forward and backward ---------------------------------------------------------------


def _tanh_model(count: int = 4) -> tf_keras.Model:
    model = tf_keras.Sequential([layers.Dense(6, "tanh") for _ in range(count)])
    model(normal(6)[:2])
    return model


def clipping_inside_the_step() -> Case:
    model = _tanh_model()

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = squared_error(y, model(x))
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, model.trainable_variables), 0.1)
        return gradients, norm, loss

    return Case(step, [model], [normal(6), normal(6)])


def penalty_outside_the_model() -> Case:
    model = _tanh_model()

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = squared_error(y, model(x))
            loss += 0.01 * tf.add_n([tf.nn.l2_loss(v) for v in model.trainable_variables])
        return tape.gradient(loss, model.trainable_variables), loss, loss

    return Case(step, [model], [normal(6), normal(6)])


def gradient_penalty() -> Case:
    model = _tanh_model()

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                predictions = model(x)
            slope = inner.gradient(predictions, x)
            loss = squared_error(y, predictions) + tf.reduce_mean(tf.square(tf.norm(slope, axis=1) - 1))
        return outer.gradient(loss, model.trainable_variables), loss

    return Case(step, [model], [normal(6), normal(6)])


def persistent_tape_two_losses() -> Case:
    model = _tanh_model()

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            predictions = model(x)
            first, second = squared_error(y, predictions), tf.reduce_mean(tf.abs(predictions))
        return [tape.gradient(loss, model.trainable_variables) for loss in (first, second)], first

    return Case(step, [model], [normal(6), normal(6)])


def symbolic_gradients() -> Case:
    model = _tanh_model()

    def step(x: Any, y: Any) -> Any:
        loss = squared_error(y, model(x))
        return tf.gradients(loss, [v.value() for v in model.trainable_variables]), tf.gradients(loss, x)

    return Case(step, [model], [normal(6), normal(6)])


def weights_without_gradient() -> Case:
    class Unused(Twice):
        def call(self, x: Any, training: Any = None) -> Any:
            self.b(x)
            return self.c(self.a(tf.stop_gradient(self.a(x)) + self.a(x)))

    return training(Unused(), normal(6), normal(3))


def two_models_share_a_layer() -> Case:
    shared = layers.Dense(6, "tanh")
    first = tf_keras.Sequential([layers.Dense(6), shared, layers.Dense(3)])
    second = tf_keras.Sequential([layers.Dense(6), shared, layers.Dense(3)])
    for model in (first, second):
        model(normal(6)[:2])

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = squared_error(y, first(x)) + squared_error(y, second(x))
        variables = first.trainable_variables + second.layers[0].trainable_variables
        return tape.gradient(loss, variables), loss

    return Case(step, [first, second], [normal(6), normal(3)])


def metrics_of_the_script() -> Case:
    model = _tanh_model()
    metric, counter = tf_keras.metrics.MeanAbsoluteError(), tf.Variable(0)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            predictions = model(x)
            loss = squared_error(y, predictions)
        metric.update_state(y, predictions)
        counter.assign_add(1)
        return tape.gradient(loss, model.trainable_variables), loss, metric.result(), counter + 0

    return Case(step, [model], [normal(6), normal(6)])


def trainable_variable_of_the_script() -> Case:
    model, scale = _tanh_model(), tf.Variable(2.0)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = squared_error(y, model(x) * scale)
        return tape.gradient(loss, [*model.trainable_variables, scale]), loss

    return Case(step, [model], [normal(6), normal(6)])


def script_variable_on_both_sides() -> Case:
    model = _tanh_model()
    scale = tf.Variable(1.5, name="scale")

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = squared_error(y, model(x * scale) * scale)
        return tape.gradient(loss, [*model.trainable_variables, scale]), loss

    return Case(step, [model], [normal(6), normal(6)])


def attacked_inputs() -> Case:
    """The loss on inputs that were moved along their own gradient."""
    model = _tanh_model()

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as inner:
            inner.watch(x)
            clean = squared_error(y, model(x))
        moved = tf.stop_gradient(x + 0.1 * tf.sign(inner.gradient(clean, x)))
        with tf.GradientTape() as tape:
            loss = squared_error(y, model(moved))
        return loss, tape.gradient(loss, model.trainable_variables)

    return Case(step, [model], [normal(6), normal(6)])


def evaluation() -> Case:
    model = _tanh_model()

    def step(x: Any, y: Any) -> Any:
        predictions = model(x, training=False)
        return {"predictions": predictions, "loss": squared_error(y, predictions), "none": None, "number": 3}

    return Case(step, [model], [normal(6), normal(6)])


def unknown_batch_size() -> Case:
    case = cnn_with_batch_normalization()
    return Case(case.function, case.models, case.arguments, {"dynamic": True})


#: Two of the first four by default, in turns; with `--full` every model with all of them.
SETTINGS = (
    *((2, 4, "interleaved"), (3, 2, "simple"), (4, 1, "interleaved"), (2, 2, "zb_v")),
    *((3, 4, "zb_h1"), (2, 4, "interleaved_1f1b"), (2, 4, "v_half"), (2, 4, "v_min")),
)
SMALL = [
    mlp, cnn_with_batch_normalization, batch_renormalization, u_net, tied_gpt,
    layer_called_twice, two_inputs_two_outputs, embedding_and_penalties, add_loss_and_frozen_layer,
    custom_gradient, nested_function, assignments_in_call, gathers, spectral_normalization, mixed_bfloat16, float64,
    clipping_inside_the_step, penalty_outside_the_model, gradient_penalty, persistent_tape_two_losses,
    symbolic_gradients, weights_without_gradient, two_models_share_a_layer, metrics_of_the_script,
    trainable_variable_of_the_script, script_variable_on_both_sides, attacked_inputs, evaluation, unknown_batch_size,
]  # fmt: skip


def with_settings() -> Iterator[object]:
    """Every small model with every setting. By default one of the first four, in turn: test_recompute has more."""
    for (number, make), (index, setting) in itertools.product(enumerate(SMALL), enumerate(SETTINGS)):
        by_default = index == number % 4
        name = "-".join(map(str, (make.__name__, *setting)))
        yield pytest.param(make, *setting, id=name, marks=[] if by_default else [pytest.mark.full])


#: Whose graphs are large: two by default; with `--full` all, with settings that cover schedules and numbers of stages.
LARGE = [
    (masked_recurrence, 3, 2, "interleaved"), (cond_and_while, 2, 4, "interleaved"),
    *(pytest.param(*setting, marks=pytest.mark.full) for setting in (
        (lstm, 2, 4, "interleaved"), (lstm, 4, 1, "simple"), (gru, 3, 2, "interleaved"), (gru, 2, 2, "simple"),
        (cond_and_while, 3, 2, "simple"), (resnet50, 4, 2, "interleaved"), (mobilenet_v2, 3, 2, "interleaved"),
    )),
]  # fmt: skip


@cache
def built(make: Callable[[], Case]) -> Case:
    tf_keras.utils.set_random_seed(1)
    return make()


def run(
    make: Callable[[], Case],
    stages: int,
    microbatches: int,
    schedule: str = "interleaved",
    placement: tuple[int, ...] | None = None,
    recompute: bool = False,
) -> CutStep:
    case = built(make)
    settings = stages, microbatches, schedule
    options = {"placement": placement, "recompute": recompute, **case.options}
    return assert_same(case.function, case.models, case.arguments, *settings, **options)


@pytest.mark.parametrize(("make", "stages", "microbatches", "schedule"), list(with_settings()))
def test_same_bits_as_uncut(make: Any, stages: int, microbatches: int, schedule: str) -> None:
    run(make, stages, microbatches, schedule)


@pytest.mark.parametrize(
    ("make", "stages", "microbatches", "schedule"),
    LARGE,
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_same_bits_as_uncut_for_large_graphs(make: Any, stages: int, microbatches: int, schedule: str) -> None:
    run(make, stages, microbatches, schedule)


# The GPT by default on processes (tests/distributed/test_equality.py).
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", ["interleaved", "simple"])
@pytest.mark.parametrize("make", [mlp, pytest.param(tied_gpt, marks=pytest.mark.full)], ids=["mlp", "tied_gpt"])
def test_every_number_of_stages_and_schedule(make: Any, stages: int, schedule: str) -> None:
    run(make, stages, 4 if stages == 4 else 2, schedule)


@pytest.mark.parametrize("placement", [(0, 1, 0), (1, 0), pytest.param((0, 1, 0, 1), marks=pytest.mark.full)])
@pytest.mark.parametrize("make", [mlp, tied_gpt, u_net, two_inputs_two_outputs, metrics_of_the_script])
def test_chunks_on_any_stages(make: Any, placement: tuple[int, ...]) -> None:
    step = run(make, 2, 2, placement=placement)
    assert {chunk for chunk, _, _ in step.split.segments} == set(range(len(placement)))


@pytest.mark.parametrize("placement", [(0, 1, 2, 0), (0, 1, 2, 1, 0)])
def test_shapes_that_are_tried_where_stages_may_be_visited_again(placement: tuple[int, ...]) -> None:
    run(u_net, 3, 2, placement=placement)


def test_stages_of_a_mixed_policy_hand_over_bfloat16() -> None:
    step = run(mixed_bfloat16, 3, 2)
    handed = [t for t in step.split.transfers if t.tensor is not None and t.dst_sweep is not None]
    # Two activations, and their gradients.
    assert [step.graph.type_of(t.tensor).dtype for t in handed] == ["bfloat16"] * 4


def test_a_weight_that_both_ends_of_a_model_use_stays_on_a_stage_that_has_both() -> None:
    apart, together = run(tied_gpt, 2, 2), run(tied_gpt, 2, 2, placement=(0, 1, 0))
    table = built(tied_gpt).models[0].tokens.embeddings.name.partition(":")[0]
    values = [[t for t in step.split.transfers if t.variable is not None] for step in (apart, together)]
    assert table in [apart.graph.variables[t.variable].name for t in values[0]]
    assert values[1] == []
    assert not [t for t in together.split.transfers if t.is_sum]


def test_a_tensor_goes_once_to_a_stage_with_several_chunks() -> None:
    """The skips of a U-Net end in several chunks; `assert_sound` finds what is sent twice."""
    step = run(u_net, 2, 2, placement=(0, 1, 0))
    assert step.split.handed_on
    assert all(len(set(step.ends(t))) == 1 for t in step.split.handed_on)


def test_the_gradient_of_a_shared_weight_reaches_its_owner_also_when_that_is_the_last_stage() -> None:
    """Bug: it went to the earliest stage that uses the weight; the owner got None, and the weight never trained."""
    case = built(tied_gpt)
    embeddings = case.models[0].tokens.embeddings.name.partition(":")[0]
    step = assert_same(case.function, case.models, case.arguments, 2, 2, owners={embeddings: 1}, **case.options)
    assert [o.chunk for o in step.split.outputs if o.summands] == [1]
    sums = [(t.src_chunk, t.dst_chunk) for t in step.split.transfers if t.is_sum]
    assert sums == [(0, 1)]


@pytest.mark.parametrize("make", [trainable_variable_of_the_script, script_variable_on_both_sides])
def test_the_gradient_of_a_script_variable_reaches_every_stage(make: Any) -> None:
    """Bug: it stayed where it was made, and every rank trained another value of the variable."""
    step = run(make, 3, 2)
    gradient = step.split.outputs[-2]
    assert [gradient.gets_sum(stage, step.split.placement) for stage in range(3)] == [True, True, True]


def test_a_loss_after_an_inner_gradient_reaches_every_stage() -> None:
    """Bug: it was taken for a gradient, and was None on the ranks that did not make it."""
    step = run(attacked_inputs, 2, 2)
    loss = step.split.outputs[0]
    assert (loss.delivery, loss.is_gradient) == (Delivery.SENT_TO_ALL, False)
