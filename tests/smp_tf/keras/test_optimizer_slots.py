"""Every Keras optimizer goes on after a restore as if nothing had been."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.checkpoint.survey import StateKind, survey
from smp_tf.keras import optimizer_reports, optimizer_slots, optimizer_trials
from tests.full_only import params

pytestmark = pytest.mark.large

X = np.arange(24, dtype=np.float32).reshape(8, 3) / 10.0
new, legacy = tf_keras.optimizers, tf_keras.optimizers.legacy
scaled = tf_keras.mixed_precision.LossScaleOptimizer


def falling() -> Any:
    return new.schedules.ExponentialDecay(0.05, 2, 0.5, staircase=True)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "Adadelta": lambda: new.Adadelta(0.5),
    "Adafactor": lambda: new.Adafactor(0.05),
    "Adagrad": lambda: new.Adagrad(0.05),
    "Adam": lambda: new.Adam(0.05, amsgrad=True),
    "Adam, falling rate": lambda: new.Adam(falling()),
    "Adam, averages": lambda: new.Adam(0.05, use_ema=True),
    "Adam, loss scale": lambda: scaled(new.Adam(0.05), initial_scale=4.0, dynamic_growth_steps=3),
    "AdamW": lambda: new.AdamW(0.05, weight_decay=0.1),
    "Adamax": lambda: new.Adamax(0.05),
    "Ftrl": lambda: new.Ftrl(0.05),
    "Lion": lambda: new.Lion(0.01),
    "Nadam": lambda: new.Nadam(0.05),
    "RMSprop": lambda: new.RMSprop(0.05, momentum=0.9, centered=True),
    "SGD": lambda: new.SGD(0.05),
    "SGD, momentum": lambda: new.SGD(0.05, momentum=0.9, nesterov=True),
    "legacy Adadelta": lambda: legacy.Adadelta(0.5),
    "legacy Adagrad": lambda: legacy.Adagrad(0.05),
    "legacy Adam": lambda: legacy.Adam(0.05, amsgrad=True),
    "legacy Adam, falling rate": lambda: legacy.Adam(falling()),
    "legacy Adam, loss scale": lambda: scaled(legacy.Adam(0.05), initial_scale=4.0, dynamic_growth_steps=3),
    "legacy Adamax": lambda: legacy.Adamax(0.05),
    "legacy Ftrl": lambda: legacy.Ftrl(0.05),
    "legacy Nadam": lambda: legacy.Nadam(0.05),
    "legacy RMSprop": lambda: legacy.RMSprop(0.05, momentum=0.9, centered=True),
    "legacy SGD": lambda: legacy.SGD(0.05),
    "legacy SGD, momentum": lambda: legacy.SGD(0.05, momentum=0.9),
}
#: As others, but for their formula: slots of the same number and shapes.
ONLY_FULL = (
    "Adadelta",
    "Adagrad",
    "AdamW",
    "Adamax",
    "Ftrl",
    "Lion",
    "RMSprop",
    "legacy Adadelta",
    "legacy Adagrad",
    "legacy Adamax",
    "legacy Ftrl",
    "legacy RMSprop",
)


class Net(smp.DistributedModel):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(4, activation="tanh")
        self.head = layers.Dense(2)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.head(self.hidden(x))


class Training:
    """A model, its optimizer, and steps that train it."""

    def __init__(self, optimizer: Any, eager: bool = False) -> None:
        self.model, self.optimizer = Net(), optimizer
        self.checkpoint = tf.train.Checkpoint(model=self.model, optimizer=optimizer)
        is_scaled = hasattr(optimizer, "get_scaled_loss")

        @smp.step
        def step(x: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.model(x) - 1.0) ** 2)
                used = optimizer.get_scaled_loss(loss) if is_scaled else loss
            return tape.gradient(used, self.model.trainable_variables)

        def train(x: tf.Tensor) -> None:
            gradients = [g.accumulate() for g in step(x)]
            if is_scaled:
                gradients = optimizer.get_unscaled_gradients(gradients)
            optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))

        self.train = train if eager else tf.function(train)

    def state(self) -> dict[str, Any]:
        items = survey(self.checkpoint).items.values()
        return {item.key: item.target.numpy() for item in items if item.kind is not StateKind.STATE}


@pytest.mark.parametrize("name", params(OPTIMIZERS, ONLY_FULL))
def test_training_goes_on_as_if_it_had_not_been_interrupted(
    name: str, init: Callable[..., None], tmp_path: Path
) -> None:
    init(microbatches=2)
    whole = Training(OPTIMIZERS[name]())
    manager = smp.CheckpointManager(whole.checkpoint, tmp_path)
    whole.train(X)
    whole.train(X + 1.0)
    manager.save()
    whole.train(X + 2.0)

    tf_keras.utils.set_random_seed(77)
    resumed = Training(OPTIMIZERS[name]())
    assert smp.CheckpointManager(resumed.checkpoint, tmp_path).restore() == str(tmp_path / "ckpt-1")
    resumed.train(X + 2.0)
    expected, got = whole.state(), resumed.state()
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(got[key], value, err_msg=key)


@pytest.mark.parametrize("name", params(["Adam", "Nadam", "legacy Adam", "Adam, loss scale"], ["Adam", "Nadam"]))
def test_a_training_that_is_under_way_goes_back(name: str, init: Callable[..., None], tmp_path: Path) -> None:
    init(microbatches=2)
    training = Training(OPTIMIZERS[name]())
    manager = smp.CheckpointManager(training.checkpoint, tmp_path)
    training.train(X)
    manager.save()
    saved = training.state()
    training.train(X)
    after = training.state()
    manager.restore()
    for key, value in training.state().items():
        np.testing.assert_array_equal(value, saved[key], err_msg=key)
    training.train(X)
    for key, value in training.state().items():
        np.testing.assert_array_equal(value, after[key], err_msg=key)


@pytest.mark.parametrize("name", params(["Nadam", "legacy Nadam", "Adam", "Adam, loss scale"], ["Adam"]))
def test_a_training_whose_gradients_are_applied_eagerly_goes_on(
    name: str, init: Callable[..., None], tmp_path: Path
) -> None:
    """Bug: Nadam counts in Python for which step it has multiplied its product of momenta, and began anew."""
    init(microbatches=2)
    whole = Training(OPTIMIZERS[name](), eager=True)
    manager = smp.CheckpointManager(whole.checkpoint, tmp_path)
    whole.train(X)
    whole.train(X + 1.0)
    manager.save()
    whole.train(X + 2.0)
    resumed = Training(OPTIMIZERS[name](), eager=True)
    smp.CheckpointManager(resumed.checkpoint, tmp_path).restore()
    resumed.train(X + 2.0)
    got = resumed.state()
    for key, value in whole.state().items():
        np.testing.assert_array_equal(got[key], value, err_msg=key)


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_nadam_multiplies_its_product_once_a_step(eager: bool, init: Callable[..., None]) -> None:
    """Bug: in a graph it did so for every variable, so that the updates depended on how many a rank has."""
    init(microbatches=2)
    training = Training(new.Nadam(0.05), eager=eager)
    for _ in range(3):
        training.train(X)
    # 0.9 (1 - 0.96^t / 2) for t = 1, 2, 3.
    assert float(training.optimizer._u_product) == pytest.approx(0.468 * 0.48528 * 0.5018688, rel=1e-6)


def test_nadam_in_eager_keras_does_so_too() -> None:
    """What is put right here is what Keras itself does where nothing is traced."""
    optimizer, variables = new.Nadam(0.05), [tf.Variable(1.0), tf.Variable(2.0)]
    for _ in range(3):
        optimizer.apply_gradients([(tf.constant(0.1), variable) for variable in variables])
    assert float(optimizer._u_product) == pytest.approx(0.468 * 0.48528 * 0.5018688, rel=1e-6)


def test_a_loss_scale_comes_back_with_its_count_of_good_steps(init: Callable[..., None], tmp_path: Path) -> None:
    init(microbatches=2)
    training = Training(scaled(new.Adam(0.05), initial_scale=4.0, dynamic_growth_steps=3))
    manager = smp.CheckpointManager(training.checkpoint, tmp_path)
    for _ in range(4):
        training.train(X)
    manager.save()
    resumed = Training(scaled(new.Adam(0.05), initial_scale=4.0, dynamic_growth_steps=3))
    smp.CheckpointManager(resumed.checkpoint, tmp_path).restore()

    def told(optimizer: Any) -> tuple[float, int, int]:
        return float(optimizer.loss_scale), int(optimizer.dynamic_counter), int(optimizer.iterations)

    assert told(resumed.optimizer) == told(training.optimizer) == (8.0, 1, 4)
    told_after = []
    for _ in range(2):
        resumed.train(X)
        told_after.append(told(resumed.optimizer))
    assert told_after == [(8.0, 2, 5), (16.0, 0, 6)]


def slots_of(optimizer: Any, variables: list[tf.Variable]) -> list[tuple[str, str]]:
    found = optimizer_slots.slots(optimizer, variables)
    return [(variable.name, slot_name) for variable, slot_name, _ in found]


def test_slots_are_found_whatever_the_order_the_optimizer_was_built_in() -> None:
    a, b = tf.Variable([1.0], name="a"), tf.Variable([[1.0, 2.0]], name="b")
    optimizer = new.Adafactor()
    optimizer.build([b, a])
    assert slots_of(optimizer, [a, b]) == [
        ("a:0", "r"), ("a:0", "c"), ("a:0", "v"),
        ("b:0", "r"), ("b:0", "c"), ("b:0", "v"),
    ]  # fmt: skip
    found = {(v.name, n): slot for v, n, slot in optimizer_slots.slots(optimizer, [a, b])}
    assert found["b:0", "c"] is optimizer._c[0]
    assert found["a:0", "v"] is optimizer._v[1]
    assert optimizer_slots.count_of_variables(optimizer) == 2


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if "legacy" not in name])
def test_slots_are_added_and_dropped_as_if_the_optimizer_had_been_built_so(name: str) -> None:
    made: dict[str, list[tf.Variable]] = {}

    def update(optimizer: Any, variables: list[tf.Variable]) -> None:
        optimizer.apply_gradients([(tf.ones_like(v) * 4.0, v) for v in variables])

    def trained(kind: str) -> list[tf.Variable]:
        first, second = made[kind] = [tf.Variable([1.0, 2.0], name="first"), tf.Variable([3.0], name="second")]
        optimizer = OPTIMIZERS[name]()
        optimizer.build(made[kind] if kind == "at once" else [first] if kind == "added" else [second, first])
        update(optimizer, [first])
        if kind == "added":
            optimizer_slots.add_slots(optimizer, second)
        if kind == "dropped":
            optimizer_slots.drop_slots(optimizer, second)
            assert {id(v) for v, _, _ in optimizer_slots.slots(optimizer, made[kind])} <= {id(first)}
        update(optimizer, [first] if kind == "dropped" else made[kind])
        assert optimizer_slots.count_of_variables(optimizer) == (1 if kind == "dropped" else 2)
        return made[kind]

    wanted, added, dropped = trained("at once"), trained("added"), trained("dropped")
    for found, other in zip(added, wanted, strict=True):
        np.testing.assert_array_equal(found.numpy(), other.numpy())
    np.testing.assert_array_equal(dropped[0].numpy(), wanted[0].numpy())


@pytest.mark.parametrize("is_built", [False, True])
def test_where_another_replica_is_to_have_slots_an_optimizer_stays_as_it_was(
    is_built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: its lists were doubled, and each later weight went by the slots of another one."""
    first, second = tf.Variable([1.0, 2.0], name="first"), tf.Variable([3.0], name="second")
    optimizer = new.Adam(0.05)
    if is_built:
        optimizer.build([first])
    before = slots_of(optimizer, [first, second]), optimizer_slots.count_of_variables(optimizer)
    with monkeypatch.context() as patched:
        # What stands in its place makes none.
        patched.setattr(type(optimizer), "build", lambda self, weights: None)
        assert not optimizer_slots.add_slots(optimizer, second)
    assert (slots_of(optimizer, [first, second]), optimizer_slots.count_of_variables(optimizer)) == before
    if not is_built:
        optimizer.build([first])
    assert optimizer_slots.add_slots(optimizer, second)
    optimizer.apply_gradients([(tf.ones_like(v), v) for v in (first, second)])
    assert slots_of(optimizer, [second]) == [("second:0", "momentums"), ("second:0", "velocities")]


def test_slots_of_a_legacy_optimizer_are_those_of_the_variables_that_were_updated() -> None:
    a, b = tf.Variable([1.0], name="a"), tf.Variable([1.0], name="b")
    optimizer = legacy.RMSprop(momentum=0.5)
    assert not optimizer_reports.has_slots(optimizer)
    optimizer.apply_gradients([(tf.constant([1.0]), b)])
    assert slots_of(optimizer, [a, b]) == [("b:0", "rms"), ("b:0", "momentum")]
    assert optimizer_reports.has_slots(optimizer)


def test_looking_at_an_optimizer_before_it_is_built_hides_nothing_later() -> None:
    """Keras keeps the first answer to what an optimizer tracks."""
    optimizer = new.Nadam()
    assert sorted(optimizer_slots.children(optimizer)) == ["_iterations", "_learning_rate"]
    optimizer.build([tf.Variable([1.0])])
    # Neither from others that look after us, nor from us when others have looked before.
    assert "_u_product" in tf.train.TrackableView.children(optimizer)
    other = new.Nadam()
    tf.train.TrackableView.children(other)
    other.build([tf.Variable([1.0])])
    assert sorted(optimizer_slots.children(other)) == ["_iterations", "_learning_rate", "_u_product"]


def test_an_optimizer_with_nothing_to_do_here_is_ready_and_has_no_slots() -> None:
    optimizer = legacy.Adam()
    assert not optimizer_reports.is_ready(optimizer)
    assert optimizer_reports.report(optimizer, built=False)
    assert optimizer_reports.is_ready(optimizer)
    assert not optimizer_reports.has_slots(optimizer)
    assert not optimizer_reports.report(optimizer, built=False)
    assert optimizer_reports.report(optimizer, built=True)
    assert not optimizer_reports.report(optimizer, built=False)
    assert optimizer_reports.has_slots(optimizer)


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [
        (tf_keras.optimizers.Adam(), 2.0),
        (tf_keras.optimizers.Adam(amsgrad=True, use_ema=True), 4.0),
        (tf_keras.optimizers.legacy.SGD(0.1), 0.0),
        (tf_keras.optimizers.legacy.RMSprop(momentum=0.5), 2.0),
        (tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.RMSprop()), 1.0),
        # A row and a column of numbers for a matrix of 64 x 64, and the two more that it has in any case.
        (tf_keras.optimizers.Adafactor(), pytest.approx(1.0, abs=0.1)),
    ],
)
def test_how_many_slots_an_optimizer_will_have_is_known_before_it_has_any(optimizer: Any, slots: float) -> None:
    before = set(optimizer_reports._reported)
    assert optimizer_trials.slots_of(optimizer) == slots
    assert not optimizer_reports.has_slots(optimizer)
    assert set(optimizer_reports._reported) <= before


def test_of_an_optimizer_that_cannot_be_copied_nothing_is_known() -> None:
    class Mine(tf_keras.optimizers.Optimizer):
        def __init__(self, rate: float) -> None:
            super().__init__("mine")

    assert optimizer_trials.slots_of(Mine(0.1)) is None
