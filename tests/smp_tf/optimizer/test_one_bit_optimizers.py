"""1-bit Adam and 1-bit LAMB: of replicas that are threads of one process, against the papers' algorithms in numpy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import smp_tf as smp
from smp_tf.config.config import Config
from smp_tf.errors import RankMismatchError, StepError
from smp_tf.job import runtime
from smp_tf.keras import optimizer_slots, optimizer_trials
from smp_tf.optimizer import one_bit
from smp_tf.replicas import one_bit_errors, sums
from smp_tf.replicas.one_bit_sums import BLOCK
from tests.smp_tf.exchanging_threads import Replicas

REPLICAS, WARMUP, STEPS = 2, 3, 9
RATE, BETA_1, BETA_2, EPSILON = 0.01, 0.9, 0.99, 1e-7
SHAPES = ((4, 5), (3,))
MAKERS: dict[str, Callable[..., Any]] = {
    "adam": lambda **more: smp.OneBitAdam(RATE, BETA_1, BETA_2, EPSILON, warmup_steps=WARMUP, **more),
    "lamb": lambda **more: smp.OneBitLAMB(RATE, BETA_1, BETA_2, EPSILON, weight_decay=0.1, warmup_steps=WARMUP, **more),
}


def start() -> list[np.ndarray]:
    random = np.random.default_rng(5)
    return [random.standard_normal(shape) for shape in SHAPES]


def gradients(replica: int, step: int) -> list[np.ndarray]:
    """Of each replica others; the last element of the first weight has none in the warm-up."""
    random = np.random.default_rng([replica, step])
    found = [random.standard_normal(shape) + 0.5 for shape in SHAPES]
    if step < WARMUP:
        found[0][3, 4] = 0.0
    return found


class Reference:
    """One weight on all replicas, by the papers."""

    def __init__(self, value: np.ndarray) -> None:
        self.value = value.copy()
        self.m, self.v, self.fresh = (np.zeros_like(value) for _ in range(3))
        self.worker = [np.zeros_like(value) for _ in range(REPLICAS)]
        self.server = np.zeros_like(value)
        self.step, self.coefficient, self.factor = 0, 0.0, 1.0

    def _compressed(self, value: np.ndarray) -> np.ndarray:
        return np.where(value > 0, 1.0, -1.0) * np.abs(value).mean()

    def _momentum(self, given: list[np.ndarray]) -> np.ndarray:
        sent = []
        for replica, gradient in enumerate(given):
            corrected = BETA_1 * self.m + (1 - BETA_1) * gradient + self.worker[replica]
            sent.append(self._compressed(corrected))
            self.worker[replica] = corrected - sent[-1]
        average = np.mean(sent, axis=0) + self.server
        found = self._compressed(average)
        self.server = average - found
        return np.where(self.v > 0, found, 0.0)

    def _begin(self, given: list[np.ndarray], compressed: bool) -> np.ndarray:
        """Update momentum and variance; gives the gradient that they stand for."""
        self.step += 1
        gradient = np.mean(given, axis=0)
        if self.step > WARMUP and compressed:
            before, self.m = self.m, self._momentum(given)
            return (self.m - BETA_1 * before) / (1 - BETA_1)
        self.m = BETA_1 * self.m + (1 - BETA_1) * gradient
        if self.step <= WARMUP:
            self.v = BETA_2 * self.v + (1 - BETA_2) * gradient**2
        return gradient

    @property
    def _adaptive(self) -> np.ndarray:
        frozen = self.v / (1 - BETA_2 ** min(self.step, WARMUP))
        return np.where(self.v > 0, self.m / (1 - BETA_1**self.step) / (np.sqrt(frozen) + EPSILON), 0.0)

    def adam(self, given: list[np.ndarray], compressed: bool) -> None:
        self._begin(given, compressed)
        self.value = self.value - RATE * self._adaptive

    def lamb(self, given: list[np.ndarray], compressed: bool) -> None:
        gradient = self._begin(given, compressed)
        self.fresh = BETA_2 * self.fresh + (1 - BETA_2) * gradient**2
        update = self._adaptive + 0.1 * self.value
        if self.step <= WARMUP:
            scale = np.clip(np.linalg.norm(self.value) / np.linalg.norm(update), 0.01, 10.0)
            self.coefficient = 0.9 * self.coefficient + 0.1 * scale
        else:
            root = np.sqrt(self.v / (1 - BETA_2**WARMUP)) + EPSILON
            factor = np.max(root / (np.sqrt(self.fresh / (1 - BETA_2**self.step)) + EPSILON))
            share = min(np.linalg.norm(self._adaptive) / np.linalg.norm(update), 1.0)
            factor = np.clip(factor * share + 1 - share, 0.5, 4.0)
            self.factor = np.clip(factor, self.factor * 0.9, self.factor * 1.1)
            scale = self.coefficient / (1 - 0.9**WARMUP) * self.factor
        self.value = self.value - RATE * scale * update


def by_the_papers(name: str, compressed: bool) -> list[list[np.ndarray]]:
    weights = [Reference(value) for value in start()]
    found = []
    for step in range(STEPS):
        for i, weight in enumerate(weights):
            getattr(weight, name)([gradients(replica, step)[i] for replica in range(REPLICAS)], compressed)
        found.append([weight.value for weight in weights])
    return found


class Threads:
    """Replicas with a runtime each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.replicas, self._here = Replicas(REPLICAS), threading.local()

        def current() -> Any:
            return getattr(self._here, "running", None)

        def rank() -> int:
            return int(current().topology.replica)

        monkeypatch.setattr(runtime, "current", current)
        monkeypatch.setattr(runtime, "current_or_none", current)
        # What they say of their steps; a test of that has replicas that differ.
        monkeypatch.setattr(one_bit, "allgather_json", lambda own, *given, **named: [own] * REPLICAS)
        monkeypatch.setattr(sums, "exchange_of", lambda *given: self.replicas.exchange(rank()))
        monkeypatch.setattr(
            sums,
            "sum_gradients",
            lambda tensors, name, handles: [tf.add_n(self.replicas.told(rank(), tensor)) for tensor in tensors],
        )

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        def on(replica: int) -> Any:
            self._here.running = SimpleNamespace(
                config=Config(gradient_compression="1bit"),
                topology=SimpleNamespace(
                    replicas=REPLICAS,
                    replica=replica,
                    stages=1,
                    size=REPLICAS,
                    members=lambda group: tuple(range(REPLICAS)),
                    describe="rank {}".format,
                ),
            )
            return function(replica)

        return self.replicas.run(on)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch, keras_defaults: None) -> Threads:
    return Threads(monkeypatch)


def steps_of(optimizer: Any, replica: int | None, weights: list[tf.Variable]) -> list[list[np.ndarray]]:
    found = []
    for step in range(STEPS):
        given = [gradients(r, step) for r in (range(REPLICAS) if replica is None else [replica])]
        means = [tf.constant(np.mean(of_weight, axis=0), w.dtype) for of_weight, w in zip(zip(*given), weights)]  # noqa: B905
        optimizer.apply_gradients(zip(means, weights, strict=True))
        found.append([w.numpy() for w in weights])
    return found


@pytest.mark.parametrize("several_groups", [False, True], ids=["one group", "several groups"])
@pytest.mark.parametrize("name", MAKERS)
def test_replicas_train_as_the_papers_say_and_stay_equal(
    threads: Threads, name: str, several_groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if several_groups:
        monkeypatch.setattr(one_bit_errors, "MOST_BYTES", 8)
    optimizers = [MAKERS[name]() for _ in range(REPLICAS)]

    def run(replica: int) -> list[list[np.ndarray]]:
        weights = [tf.Variable(value, dtype=tf.float64) for value in start()]
        return steps_of(optimizers[replica], replica, weights)

    first, second = threads.run(run)
    for step, wanted in enumerate(by_the_papers(name, compressed=True)):
        for one, again, value in zip(first[step], second[step], wanted, strict=True):
            assert one.tobytes() == again.tobytes()
            # What is sent, and errors, are float32.
            np.testing.assert_allclose(one, value, rtol=1e-5, atol=1e-6, err_msg=f"step {step}")
    # Without a gradient in the warm-up, a weight knows nothing but its decay.
    if name == "adam":
        assert {step[0][3, 4] for step in first} == {start()[0][3, 4]}
    of_blocks = [4 * BLOCK * (2 + 1)] if not several_groups else [4 * BLOCK * (2 + 1), 4 * BLOCK * (2 + 1)]
    assert optimizers[0].error_feedback.nbytes == sum(of_blocks)


@pytest.mark.parametrize("name", MAKERS)
def test_without_the_key_only_the_variance_is_frozen(init: Callable[..., None], name: str) -> None:
    init()
    optimizer = MAKERS[name]()
    found = steps_of(optimizer, None, [tf.Variable(value, dtype=tf.float64) for value in start()])
    for step, wanted in enumerate(by_the_papers(name, compressed=False)):
        for one, value in zip(found[step], wanted, strict=True):
            # Keras has rates of learning and decay in float32.
            np.testing.assert_allclose(one, value, rtol=1e-5, err_msg=f"step {step}")
    assert optimizer.error_feedback.nbytes == 0


def test_the_warm_up_is_adam(keras_defaults: None) -> None:
    """To the last bit, also of sparse gradients, which are made dense."""
    ours, kerass = smp.OneBitAdam(0.01, weight_decay=0.1), tf_keras.optimizers.Adam(0.01, weight_decay=0.1)
    values = []
    for optimizer in (ours, kerass):
        weight, table = tf.Variable([1.0, -2.0, 3.0]), tf.Variable(tf.ones([4, 2]))
        for step in range(4):
            sparse = tf.IndexedSlices(tf.ones([3, 2]) * (step + 1.0), tf.constant([1, 3, 1]), tf.constant([4, 2]))
            optimizer.apply_gradients([(tf.constant([0.3, -0.1, 1e-3]) * step, weight), (sparse, table)])
        values.append((weight.numpy().tolist(), table.numpy()))
    assert values[0][0] == values[1][0]
    np.testing.assert_allclose(values[0][1], values[1][1], rtol=1e-6)


def test_replicas_at_other_steps_are_refused_at_the_first_use(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One would have sent its gradients and the other its momenta, and both would have waited."""
    other, asked = {"iterations": 7, "warmup_steps": WARMUP}, []

    def allgather(own: Any, group: Any, name: str) -> list[Any]:
        asked.append(name)
        return [own, other]

    monkeypatch.setattr(one_bit, "allgather_json", allgather)
    optimizer = MAKERS["adam"]()

    def apply(replica: int) -> None:
        optimizer.apply_gradients([(tf.ones([3]), weight)])

    weight = tf.Variable(tf.ones([3]))

    def refused(replica: int) -> str:
        if replica:
            return ""
        with pytest.raises(RankMismatchError) as error:
            apply(replica)
        return str(error.value)

    said, _ = threads.run(refused)
    assert said == (
        "The ranks do not agree on the steps of OneBitAdam:\n  iterations: rank 1 has 7; rank 0 has 0\n"
        "Restore the same checkpoint on all replicas, and give the optimizer the same arguments."
    )
    assert asked == ["the first use of OneBitAdam"]


def test_bfloat16_weights_train_and_none_is_left_out(threads: Threads) -> None:
    def run(replica: int) -> Any:
        optimizer = MAKERS["adam"]()
        half, other = tf.Variable(tf.ones([3], tf.bfloat16)), tf.Variable(1.0)
        for _ in range(WARMUP + 1):
            optimizer.apply_gradients([(tf.ones([3], tf.bfloat16) * (1 + replica), half), (None, other)])
        return tf.cast(half, tf.float32).numpy().tolist(), float(other), int(optimizer.iterations)

    first, second = threads.run(run)
    assert first == second
    assert first[1:] == (1.0, WARMUP + 1)
    assert max(first[0]) < 1.0


def test_gradients_that_are_not_to_be_averaged_are_refused(threads: Threads) -> None:
    def run(replica: int) -> str:
        weight = tf.Variable(1.0)
        with pytest.raises(StepError) as raised:
            MAKERS["adam"]().apply_gradients([(tf.constant(1.0), weight)], skip_gradients_aggregation=True)
        return str(raised.value)

    assert "apply_gradients was told not to (skip_gradients_aggregation, or" in threads.run(run)[0]


def test_a_weight_of_open_shape_is_refused(threads: Threads) -> None:
    def run(replica: int) -> str:
        weight = tf.Variable([1.0], shape=[None])
        with pytest.raises(StepError) as raised:
            MAKERS["adam"]().apply_gradients([(tf.constant([1.0]), weight)])
        return str(raised.value)

    assert "need a known shape" in threads.run(run)[0]


def test_slots_and_errors_are_counted(threads: Threads, keras_defaults: None) -> None:
    """Errors take as much as a weight, and the part that a replica averages."""
    assert optimizer_trials.slots_of(smp.OneBitAdam()) == 2.0
    assert optimizer_trials.slots_of(smp.OneBitLAMB()) == 3.0
    assert threads.run(lambda replica: optimizer_trials.slots_of(smp.OneBitAdam())) == [3.5, 3.5]


@pytest.mark.parametrize("name", MAKERS)
def test_slots_are_saved_and_errors_are_not(threads: Threads, name: str) -> None:
    def run(replica: int) -> Any:
        optimizer, weight = MAKERS[name](), tf.Variable([1.0, 2.0])
        optimizer.apply_gradients([(tf.constant([1.0, 0.5]), weight)])
        assert optimizer.error_feedback.nbytes
        return sorted(slot for _, slot, _ in optimizer_slots.slots(optimizer, [weight])), len(optimizer.variables)

    more = ["coefficients", "factors", "fresh"] if name == "lamb" else []
    # And the steps.
    assert threads.run(run)[0] == (sorted([*more, "momentums", "velocities"]), 3 + len(more))


@pytest.mark.parametrize("name", MAKERS)
def test_an_optimizer_can_be_made_of_its_configuration(keras_defaults: None, name: str) -> None:
    made = MAKERS[name](name="mine")
    again = tf_keras.optimizers.deserialize(tf_keras.optimizers.serialize(made))
    assert type(again) is type(made)
    assert again.get_config() == made.get_config()
    assert again.get_config()["warmup_steps"] == WARMUP
    schedule = tf_keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    assert float(type(made).from_config(type(made)(schedule).get_config()).learning_rate) == pytest.approx(0.1)


@pytest.mark.parametrize("kind", [smp.OneBitAdam, smp.OneBitLAMB])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"warmup_steps": 0}, "must be an int of at least 1: .* Received: warmup_steps=0"),
        ({"warmup_steps": True}, "Received: warmup_steps=True"),
        ({"warmup_steps": 2.0}, r"Received: warmup_steps=2\.0"),
        ({"beta_1": 1.0}, r"beta_1 of OneBit.* below 1\. Received: beta_1=1\.0"),
        ({"beta_2": -0.1}, "beta_2 of OneBit.* at least 0"),
        ({"global_clipnorm": 1.0}, "takes no clipnorm, clipvalue, global_clipnorm: .*as smp.clip_by_global_norm does"),
        ({"amsgrad": True}, "has no argument 'amsgrad'"),
    ],
)
def test_bad_arguments_are_told(kind: type, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"coefficient_beta": 1.0}, r"coefficient_beta of OneBitLAMB .*coefficient_beta=1\.0"),
        ({"min_factor": 5.0}, r"min_factor of OneBitLAMB .* Received: min_factor=5\.0, max_factor=4\.0"),
        ({"min_coefficient": 0.0}, "min_coefficient of OneBitLAMB must be above 0"),
    ],
)
def test_bad_arguments_of_lamb_are_told(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        smp.OneBitLAMB(**given)
