"""Optimizers skip what other ranks store."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.errors import OwnershipError, StepError
from smp_tf.optimizer import patch as patched
from smp_tf.optimizer.patch import OptimizerPatch, optimizer_patch
from smp_tf.variables.guarded import tracing_step
from smp_tf.variables.store import VariableStore
from tests.smp_tf.variables.test_store import settle

pytestmark = pytest.mark.usefixtures("keras_defaults")


class Net(smp.DistributedModel):
    def __init__(self) -> None:
        super().__init__(name="net")
        self.inner = layers.Dense(2)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.inner(x) + x


NEW = sorted(
    name
    for name, kind in vars(tf_keras.optimizers).items()
    if inspect.isclass(kind) and issubclass(kind, tf_keras.optimizers.Optimizer) and name not in ("Optimizer",)
)
LEGACY = sorted(
    name
    for name, kind in vars(tf_keras.optimizers.legacy).items()
    if inspect.isclass(kind) and issubclass(kind, tf_keras.optimizers.legacy.Optimizer) and name != "Optimizer"
)
OPTIMIZERS = [
    *(pytest.param(getattr(tf_keras.optimizers, name), id=name) for name in NEW),
    *(pytest.param(getattr(tf_keras.optimizers.legacy, name), id=f"legacy-{name}") for name in LEGACY),
]


def test_the_optimizers_of_keras_are_all_here() -> None:
    assert {"Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl", "Adafactor"} <= {*NEW}
    assert {"Adam", "SGD", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl"} <= {*LEGACY}


@pytest.fixture
def patch() -> Iterator[OptimizerPatch]:
    found = OptimizerPatch()
    found.install()
    yield found
    found.remove()


def own_and_remote() -> tuple[tf.Variable, tf.Variable]:
    """Two weights of one model: this rank stores the first, another rank the second."""
    store = VariableStore("net")
    with tf.variable_creator_scope(store.creator), tracing_step():
        own = tf.Variable(lambda: tf.constant([1.0, 2.0]), name="own")
        remote = tf.Variable(lambda: tf.zeros([1000]), name="remote")
    settle(store, {0: 0, 1: 1}, stage=0, seed=0)
    remote.kept_alive = store  # as the model does
    return own, remote


def slots_of(optimizer: Any) -> list[tuple[int, ...]]:
    """Shapes of an optimizer's variables but its counters and rates."""
    variables = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
    return [tuple(v.shape) for v in variables if v.shape.rank]


@pytest.mark.parametrize("kind", OPTIMIZERS)
class TestEveryOptimizer:
    def test_pairs_of_other_ranks_are_dropped_before_slots_are_built(
        self, kind: Any, patch: OptimizerPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        own, remote = own_and_remote()
        optimizer = kind()
        tf.get_logger().addHandler(caplog.handler)
        try:
            optimizer.apply_gradients([(tf.constant([0.5, -0.5]), own), (None, remote)])
            optimizer.apply_gradients(zip([tf.constant([0.5, -0.5]), None], [own, remote], strict=True))
        finally:
            tf.get_logger().removeHandler(caplog.handler)
        assert caplog.messages == []
        assert all(shape in ((2,), (1,)) for shape in slots_of(optimizer)), slots_of(optimizer)
        assert int(optimizer.iterations) == 2

        plain, alone = tf.Variable([1.0, 2.0]), kind()
        for _ in range(2):
            alone.apply_gradients([(tf.constant([0.5, -0.5]), plain)])
        assert own.numpy().tolist() == plain.numpy().tolist()
        assert own.numpy().tolist() != [1.0, 2.0]

    def test_the_iterations_advance_where_nothing_remains(self, kind: Any, patch: OptimizerPatch) -> None:
        own, remote = own_and_remote()
        optimizer = kind()
        optimizer.apply_gradients([(None, remote)])
        optimizer.apply_gradients([(None, own), (None, remote)])

        @tf.function
        def train() -> None:
            optimizer.apply_gradients([(None, remote)])

        train()
        assert int(optimizer.iterations) == 3
        assert own.numpy().tolist() == [1.0, 2.0]


def test_a_scheduled_rate_is_that_of_all_ranks_where_nothing_remains(patch: OptimizerPatch) -> None:
    """A rank without weights showed the first learning rate for ever."""
    own, remote = own_and_remote()
    halved = tf_keras.optimizers.schedules.ExponentialDecay(1.0, decay_steps=1, decay_rate=0.5)
    here, elsewhere = tf_keras.optimizers.SGD(halved), tf_keras.optimizers.SGD(halved)
    for expected in (1.0, 0.5, 0.25):
        here.apply_gradients([(tf.constant([0.5, -0.5]), own), (None, remote)])
        elsewhere.apply_gradients([(None, remote)])
        assert (float(here.learning_rate), float(elsewhere.learning_rate)) == (expected, expected)


def test_a_graph_of_updates_grows_with_the_weights_and_not_with_their_square(
    patch: OptimizerPatch, init: Callable[..., None], two_partitions: Callable[[], None]
) -> None:
    """Every op of an update once waited for every gradient: millions of edges for a ResNet of 270 layers."""
    init()
    two_partitions()

    def edges(count: int) -> int:
        store = VariableStore("net")
        with tf.variable_creator_scope(store.creator), tracing_step():
            weights = [tf.Variable(lambda: tf.zeros([2])) for _ in range(count)]
        settle(store, dict.fromkeys(range(count), 0), stage=0, seed=0)
        optimizer = tf_keras.optimizers.SGD(1.0, momentum=0.9)

        def train(gradients: list[tf.Tensor]) -> None:
            optimizer.apply_gradients(zip(gradients, weights, strict=True))

        function = tf.function(train).get_concrete_function([tf.TensorSpec([2])] * count)
        assert any(op.type == "NoOp" for op in function.graph.get_operations())
        return sum(len(op.control_inputs) for op in function.graph.get_operations())

    few, some, many = edges(10), edges(20), edges(40)
    assert many - some == 2 * (some - few)


@pytest.mark.parametrize("name", NEW)
def test_building_an_optimizer_makes_slots_for_own_variables_only(name: str, patch: OptimizerPatch) -> None:
    own, remote = own_and_remote()
    optimizer = getattr(tf_keras.optimizers, name)()
    optimizer.build([own, remote])
    assert (1000,) not in slots_of(optimizer)


def traces_and_weights(optimizer: Any) -> tuple[int, list[np.ndarray]]:
    """How often TensorFlow traces a function that trains three steps, the model and the slots made in it."""
    model = Net()
    traces = []

    @smp.step
    def forward_backward(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        return loss, tape.gradient(loss, model.trainable_variables)

    @tf.function
    def train(x: tf.Tensor) -> tf.Tensor:
        traces.append(1)
        loss, gradients = forward_backward(x)
        means = [gradient.accumulate() for gradient in gradients]
        optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
        return loss.reduce_mean()

    for _ in range(3):
        train(tf.reshape(tf.range(8.0), [4, 2]))
    return len(traces), model.get_weights()


@pytest.mark.parametrize(
    "make",
    [
        tf_keras.optimizers.Adam,
        tf_keras.optimizers.legacy.Adam,
        lambda: tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.Adam()),
    ],
    ids=["new", "legacy", "loss scaled"],
)
def test_a_function_in_which_slots_are_made_is_traced_once(
    make: Callable[[], Any], init: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    init(microbatches=2)
    once = traces_and_weights(make())
    monkeypatch.setattr(patched, "_slots_need_no_second_trace", lambda weights: contextlib.nullcontext())
    smp.shutdown()
    init(microbatches=2)
    twice = traces_and_weights(make())
    assert (once[0], twice[0]) == (1, 2)
    for now, before in zip(once[1], twice[1], strict=True):
        np.testing.assert_array_equal(now, before)


class TestBuiltBeforeTheFirstStep:
    def undecided(self) -> tuple[VariableStore, tf.Variable]:
        store = VariableStore("net")
        with tf.variable_creator_scope(store.creator), tracing_step():
            return store, tf.Variable(lambda: tf.zeros([1000]), name="undecided")

    def test_an_optimizer_would_make_slots_on_every_rank_and_is_refused(
        self, patch: OptimizerPatch, init: Callable[..., None], two_partitions: Callable[[], None]
    ) -> None:
        init()
        two_partitions()
        _store, variable = self.undecided()
        optimizer = tf_keras.optimizers.Adam()
        with pytest.raises(StepError, match=r"built for variable 'undecided' before .* first step") as raised:
            optimizer.build([tf.Variable([1.0]), variable])
        assert "Build the optimizer after the first step, or not at all: apply_gradients does it." in str(raised.value)
        assert slots_of(optimizer) == []

    def test_with_one_partition_it_is_built(self, patch: OptimizerPatch, init: Callable[..., None]) -> None:
        init()
        _store, variable = self.undecided()
        optimizer = tf_keras.optimizers.Adam()
        optimizer.build([variable])
        assert slots_of(optimizer) == [(1000,), (1000,)]


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "loss scaled"])
def test_averages_of_weights_are_put_in_place_where_the_weights_are(scaled: bool, patch: OptimizerPatch) -> None:
    own, remote = own_and_remote()
    optimizer = inner = tf_keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5)
    inner.apply_gradients([(tf.ones([2]), own), (None, remote)])
    assert own.numpy().tolist() == [0.0, 1.0]
    if scaled:
        optimizer = tf_keras.mixed_precision.LossScaleOptimizer(inner)
    optimizer.finalize_variable_values([own, remote])
    assert own.numpy().tolist() == [0.5, 1.5]


def test_a_gradient_that_is_at_hand_for_a_variable_that_is_not_is_dropped(patch: OptimizerPatch) -> None:
    own, remote = own_and_remote()
    tf_keras.optimizers.SGD(1.0).apply_gradients([(tf.ones([2]), own), (tf.ones([1000]), remote)])
    assert own.numpy().tolist() == [0.0, 1.0]
    with pytest.raises(OwnershipError):
        remote.numpy()


def test_no_gradient_at_all_is_the_error_it_always_was(patch: OptimizerPatch) -> None:
    with pytest.raises(ValueError, match="No gradients provided"):
        tf_keras.optimizers.SGD().apply_gradients([(None, tf.Variable(1.0))])


def test_other_models_train_as_before(patch: OptimizerPatch) -> None:
    model = tf_keras.Sequential([layers.Dense(1, kernel_initializer="ones", use_bias=False)])
    model.compile(tf_keras.optimizers.SGD(0.5), "mse")
    model.fit(np.ones([4, 2], np.float32), np.ones([4, 1], np.float32), epochs=1, verbose=0)
    assert model.get_weights()[0].tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("kind", [tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD], ids=["new", "legacy"])
def test_a_weight_s_change_waits_for_no_other_weight_s_gradient(kind: type, init: Callable[..., None]) -> None:
    """Keras made one op of all gradients, for TensorFlow's strategies: each weight waited for the last average."""
    init(microbatches=2)
    model = smp.DistributedModel(lambda: tf_keras.Sequential([tf_keras.Input((4,)), layers.Dense(4), layers.Dense(4)]))
    optimizer = kind(0.1)

    @smp.step
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    @tf.function
    def train(x: tf.Tensor) -> None:
        sums = [gradient.accumulate() for gradient in step(x)]
        optimizer.apply_gradients(zip(sums, model.trainable_variables, strict=True))

    operations = train.get_concrete_function(tf.ones([4, 4])).graph.get_operations()
    assert "IdentityN" not in {operation.type for operation in operations}


def test_an_aggregator_that_an_older_optimizer_is_given_is_called(init: Callable[..., None]) -> None:
    """It was left out with the sum over the replicas of a strategy of TensorFlow's, without a word."""
    init(microbatches=2)
    model = smp.DistributedModel(lambda: tf_keras.Sequential([tf_keras.Input((4,)), layers.Dense(4)]))
    given: list[int] = []

    def doubled(pairs: Any) -> list[Any]:
        found = [(2.0 * gradient, variable) for gradient, variable in pairs]
        given.append(len(found))
        return found

    optimizer = tf_keras.optimizers.legacy.SGD(0.1, gradient_aggregator=doubled)

    @smp.step
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    sums = [gradient.accumulate() for gradient in step(tf.ones([4, 4]))]
    optimizer.apply_gradients(zip(sums, model.trainable_variables, strict=True))
    assert given == [2]


class TestClipping:
    def test_not_where_all_gradients_are_at_hand(self, patch: OptimizerPatch) -> None:
        own, _ = own_and_remote()
        tf_keras.optimizers.SGD(1.0, global_clipnorm=1.0).apply_gradients([(tf.constant([3.0, 4.0]), own)])
        assert own.numpy().tolist() == pytest.approx([0.4, 1.2])

    def test_clipping_each_gradient_alone_is_fine(self, patch: OptimizerPatch) -> None:
        own, remote = own_and_remote()
        optimizer = tf_keras.optimizers.SGD(1.0, clipnorm=1.0)
        optimizer.apply_gradients([(tf.constant([3.0, 4.0]), own), (None, remote)])
        assert own.numpy().tolist() == pytest.approx([0.4, 1.2])


class TestPatch:
    def methods(self) -> dict[tuple[type, str], Any]:
        kinds = [
            *(getattr(tf_keras.optimizers, n) for n in NEW),
            *(getattr(tf_keras.optimizers.legacy, n) for n in LEGACY),
        ]
        owners = {base for kind in kinds for base in kind.__mro__}
        return {
            (owner, name): owner.__dict__[name]
            for owner in owners
            for name in ("build", "apply_gradients", "finalize_variable_values")
            if name in owner.__dict__
        }

    def test_it_comes_and_goes_without_a_trace(self) -> None:
        before = self.methods()
        patch = OptimizerPatch()
        assert patch.install() is True
        between = self.methods()
        assert all(between[key] is not before[key] for key in before)
        assert patch.install() is False
        assert self.methods() == between
        patch.remove()
        assert self.methods() == before
        patch.remove()
        assert self.methods() == before

    def test_a_class_of_the_script_with_its_own_apply_gradients_is_filtered_too(self) -> None:
        seen = []

        class Own(tf_keras.optimizers.SGD):
            def apply_gradients(self, grads_and_vars: Any, **kwargs: Any) -> Any:
                """Notes what it is given."""
                pairs = list(grads_and_vars)
                seen.append([v.name for _, v in pairs])
                return super().apply_gradients(pairs, **kwargs)

        patch = OptimizerPatch()
        patch.install()
        try:
            own, remote = own_and_remote()
            Own(1.0).apply_gradients([(tf.ones([2]), own), (None, remote)])
            assert Own.apply_gradients.__doc__ == "Notes what it is given."
        finally:
            patch.remove()
        assert seen == [["own:0"]]

    def test_a_distributed_model_installs_it_and_shutdown_removes_it(self, init: Callable[..., None]) -> None:
        before = self.methods()
        init()
        assert self.methods() == before
        Net()
        assert self.methods() != before
        assert optimizer_patch.install() is False
        smp.shutdown()
        assert self.methods() == before
