"""`fit`, `evaluate` and `predict` give what plain Keras gives, whatever the number of microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.errors import StepError
from tests.full_only import params

pytestmark = pytest.mark.large

RANDOM = np.random.RandomState(0)
X = RANDOM.randn(22, 6).astype(np.float32)
CLASSES = RANDOM.randint(0, 3, 22)
NUMBERS = RANDOM.randn(22, 2).astype(np.float32)
WEIGHTS = RANDOM.rand(22).astype(np.float32)

FROM_LOGITS = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def classifier() -> tf_keras.Model:
    return tf_keras.Sequential([layers.Dense(8, activation="tanh", input_shape=(6,)), layers.Dense(3)])


def two_outputs() -> tf_keras.Model:
    inputs = tf_keras.Input((6,))
    hidden = layers.Dense(8, activation="tanh", name="hidden")(inputs)
    outputs = [layers.Dense(3, name="kind")(hidden), layers.Dense(2, name="size")(hidden)]
    return tf_keras.Model(inputs, outputs, name="two")


def masked() -> tf_keras.Model:
    inputs = tf_keras.Input((5,), dtype=tf.int32)
    words = layers.Embedding(7, 4, mask_zero=True)(inputs)
    tags = layers.Dense(3, name="tags")(layers.SimpleRNN(6, return_sequences=True)(words))
    whole = layers.Dense(2, name="whole")(layers.GlobalAveragePooling1D()(words))
    return tf_keras.Model(inputs, [tags, whole])


SENTENCES = RANDOM.randint(1, 7, (22, 5)) * (np.arange(5) < RANDOM.randint(1, 6, (22, 1)))
# The first microbatch of the first batch has no valid word at all.
SENTENCES[:2] = 0
TAGS = RANDOM.randint(0, 3, (22, 5))


def ragged() -> tf_keras.Model:
    inputs = tf_keras.Input((None,), dtype=tf.int32, ragged=True)
    padded = layers.Lambda(lambda words: words.to_tensor(shape=[None, 5]))(inputs)
    return tf_keras.Model(inputs, layers.Dense(3)(layers.Embedding(7, 4, mask_zero=True)(padded)))


def ragged_batches() -> tf.data.Dataset:
    lengths = np.arange(22)[:, None] % 5 + 1
    words = tf.ragged.boolean_mask(np.maximum(SENTENCES, 1), np.arange(5) < lengths)
    return tf.data.Dataset.from_tensor_slices((words, TAGS)).batch(10)


def with_losses() -> tf_keras.Model:
    inputs = tf_keras.Input((6,))
    hidden = layers.Dense(8, kernel_regularizer="l2", activity_regularizer="l2", name="hidden")(inputs)
    outputs = layers.Dense(3, name="head")(hidden)
    model = tf_keras.Model(inputs, outputs)
    model.add_loss(0.1 * tf.reduce_mean(hidden**2))
    return model


class Meter(tf_keras.metrics.Metric):
    """A stateful metric of the user's own."""

    def __init__(self) -> None:
        super().__init__(name="meter")
        self.largest = self.add_weight("largest", initializer="zeros")
        self.count = self.add_weight("count", initializer="zeros", dtype=tf.int32)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.largest.assign(tf.maximum(self.largest, tf.reduce_max(y_pred)))
        self.count.assign_add(tf.shape(y_pred)[0])

    def result(self) -> tf.Tensor:
        return self.largest + tf.cast(self.count, tf.float32)


def batches(size: int, known: bool = True) -> tf.data.Dataset:
    dataset = tf.data.Dataset.from_tensor_slices((X, CLASSES))
    if known:
        return dataset.batch(size)
    return (
        dataset.batch(size)
        .map(lambda x, y: (tf.ensure_shape(x, [None, 6]), y))
        .apply(tf.data.experimental.assert_cardinality(-(-22 // size)))
    )


class Sequence(tf_keras.utils.Sequence):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        part = slice(5 * index, 5 * index + 5)
        return X[part], CLASSES[part]


def generator() -> Iterator[Any]:
    while True:
        yield X[:8], CLASSES[:8]
        yield X[8:16], CLASSES[8:16]


PLAIN = {"loss": FROM_LOGITS, "metrics": ["accuracy"]}
#: Their last batch is smaller, and has a program of its own: where that is not the point, there are two equal ones.
ARRAYS = {"x": X, "y": CLASSES, "batch_size": 8}
EVEN = {"x": X[:16], "y": CLASSES[:16], "batch_size": 8}
BOTH = {"x": X, "y": {"kind": CLASSES, "size": NUMBERS}, "batch_size": 8}
BOTH_EVEN = {"x": X[:16], "y": {"kind": CLASSES[:16], "size": NUMBERS[:16]}, "batch_size": 8}

#: Name -> (builder, what `compile` is given, what `fit` is given).
CASES: dict[str, tuple[Callable[[], Any], Mapping[str, Any], Mapping[str, Any]]] = {
    "arrays, the last batch ragged": (classifier, PLAIN, ARRAYS),
    "validation data": (classifier, PLAIN, {**EVEN, "validation_data": (X[:9], CLASSES[:9])}),
    "validation split": (classifier, PLAIN, {**ARRAYS, "validation_split": 0.3, "batch_size": 5}),
    "validation every second epoch": (
        classifier, PLAIN, {**EVEN, "validation_data": (X[:8], CLASSES[:8]), "validation_freq": 2},
    ),
    "shuffled": (classifier, PLAIN, {**EVEN, "shuffle": True}),
    "sample weights": (
        classifier, {**PLAIN, "weighted_metrics": ["accuracy"]}, {**ARRAYS, "sample_weight": WEIGHTS},
    ),
    "class weights": (classifier, PLAIN, {**EVEN, "class_weight": {0: 0.5, 1: 2.0, 2: 1.0}}),
    "a dataset": (classifier, PLAIN, {"x": batches(8)}),
    "a dataset of unknown batch size": (classifier, PLAIN, {"x": batches(8, known=False)}),
    "a dataset, steps per epoch": (classifier, PLAIN, {"x": batches(8).take(2).repeat(), "steps_per_epoch": 4}),
    "a sequence": (classifier, PLAIN, {"x": Sequence(), "shuffle": False}),
    "a generator": (classifier, PLAIN, {"x": generator, "steps_per_epoch": 2}),
    "initial epoch": (classifier, PLAIN, {**EVEN, "initial_epoch": 1, "epochs": 3}),
    "several steps per execution": (classifier, {**PLAIN, "steps_per_execution": 2}, ARRAYS),
    "steps per execution as Keras likes": (classifier, {**PLAIN, "steps_per_execution": "auto"}, EVEN),
    "several outputs": (
        two_outputs,
        {
            "loss": {"kind": FROM_LOGITS, "size": "mae"},
            "loss_weights": {"kind": 1.0, "size": 0.2},
            "metrics": {"kind": ["accuracy"], "size": ["mse", "mae"]},
        },
        BOTH,
    ),
    "one loss of two": (two_outputs, {"loss": [None, "mse"]}, {**BOTH_EVEN, "y": [CLASSES[:16], NUMBERS[:16]]}),
    "a sum as the loss": (
        two_outputs,
        {"loss": [FROM_LOGITS, tf_keras.losses.MeanSquaredError(reduction="sum")]},
        {**BOTH, "y": [CLASSES, NUMBERS]},
    ),
    "a loss function of the user's": (
        classifier,
        {"loss": lambda y, p: tf.reduce_mean((p - tf.cast(y, tf.float32)) ** 2, axis=-1)},
        {**EVEN, "y": CLASSES[:16, None]},
    ),
    "masked and unmasked losses": (
        masked,
        {"loss": [FROM_LOGITS, "mse"], "loss_weights": [1.0, 0.5], "weighted_metrics": [["accuracy"], []]},
        {"x": SENTENCES, "y": [TAGS, NUMBERS], "batch_size": 8},
    ),
    "a loss that ignores a class": (
        masked,
        {"loss": [tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1), None]},
        {"x": SENTENCES, "y": [TAGS, NUMBERS], "batch_size": 8, "sample_weight": WEIGHTS},
    ),
    "ragged inputs and a masked loss": (ragged, {"loss": FROM_LOGITS}, {"x": ragged_batches()}),
    "losses of layers": (with_losses, PLAIN, ARRAYS),
    "metrics with a state": (
        classifier,
        {
            "loss": tf_keras.losses.CategoricalCrossentropy(from_logits=True),
            "metrics": [
                Meter, tf_keras.metrics.TopKCategoricalAccuracy, lambda: tf_keras.metrics.OneHotMeanIoU(3, name="iou"),
                tf_keras.metrics.CategoricalAccuracy,
            ],
        },
        {**EVEN, "y": np.eye(3, dtype=np.float32)[CLASSES[:16]]},
    ),
}  # fmt: skip


#: As others in what smp_tf does for them: by default one of each kind runs.
CASES_ONLY_FULL = (
    *("validation every second epoch", "class weights", "initial epoch", "a dataset, steps per epoch"),
    *("a loss function of the user's", "one loss of two", "steps per execution as Keras likes"),
    *("a loss that ignores a class", "a dataset", "shuffled", "validation data", "validation split"),
    *("a generator", "metrics with a state", "arrays, the last batch ragged"),
)
#: The cases after which predictions are compared, too.
PREDICTED = ("arrays, the last batch ragged", "several outputs", "masked and unmasked losses")


def compiled(model: Any, options: Mapping[str, Any], optimizer: Any = None) -> Any:
    given = dict(options)
    given["metrics"] = tf.nest.map_structure(
        lambda m: m() if isinstance(m, type) or callable(m) else m, given.get("metrics", [])
    )
    model.compile(optimizer=optimizer or tf_keras.optimizers.SGD(0.05, momentum=0.9), **given)
    return model


def fitted(model: Any, given: Mapping[str, Any]) -> dict[str, list[float]]:
    given = {"epochs": 2, "verbose": 0, **given}
    if "validation_split" not in given and "shuffle" not in given:
        given["shuffle"] = False
    if callable(given["x"]):
        given["x"] = given["x"]()
    history: dict[str, list[float]] = model.fit(**given).history
    return history


def compare(build: Callable[[], Any], options: Mapping[str, Any], given: Mapping[str, Any], **how: Any) -> None:
    """Trains a model plainly and distributed, from the same weights, and compares all there is to see."""
    plain = build()
    split = smp.DistributedModel(build)
    split.set_weights(plain.get_weights())
    make = how.get("optimizer", lambda: None)
    compiled(plain, options, make())
    compiled(split, options, make())
    tf.random.set_seed(11)
    expected = fitted(plain, given)
    tf.random.set_seed(11)
    found = fitted(split, given)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-6, err_msg=name)
    for weight, same in zip(split.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(weight, same, rtol=1e-4, atol=1e-6)
    if "predict" not in how:
        return
    inputs = given["x"] if isinstance(given["x"], np.ndarray) else X
    predicted, expected_too = (tf.nest.flatten(model.predict(inputs, verbose=0)) for model in (split, plain))
    for ours, theirs in zip(predicted, expected_too, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", params(CASES, CASES_ONLY_FULL))
def test_the_history_is_that_of_plain_keras(init: Callable[..., None], case: str) -> None:
    init(microbatches=3)
    compare(*CASES[case], **({"predict": True} if case in PREDICTED else {}))


@pytest.mark.parametrize("case", params(["validation data", "several outputs"], ["several outputs"]))
def test_so_it_is_without_microbatches(init: Callable[..., None], case: str) -> None:
    init(microbatches=1)
    compare(*CASES[case])


OPTIMIZERS = {
    "adadelta": lambda: tf_keras.optimizers.Adadelta(0.5),
    "adafactor": lambda: tf_keras.optimizers.Adafactor(0.05),
    "adagrad": lambda: tf_keras.optimizers.Adagrad(0.05),
    "adam, norm of each clipped": lambda: tf_keras.optimizers.Adam(0.01, clipnorm=0.1),
    "adamax, values clipped": lambda: tf_keras.optimizers.Adamax(0.01, clipvalue=0.01),
    "adamw": lambda: tf_keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "ftrl": lambda: tf_keras.optimizers.Ftrl(0.05),
    "lion": lambda: tf_keras.optimizers.Lion(0.001),
    "nadam": lambda: tf_keras.optimizers.Nadam(0.01),
    "rmsprop": lambda: tf_keras.optimizers.RMSprop(0.01, momentum=0.5),
    "sgd, norm of all clipped": lambda: tf_keras.optimizers.SGD(0.1, global_clipnorm=0.1),
    "sgd, averaged weights": lambda: tf_keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3),
    "a schedule": lambda: tf_keras.optimizers.SGD(tf_keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "scaled losses": lambda: tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.Adam(0.01)),
    "legacy adam": lambda: tf_keras.optimizers.legacy.Adam(0.01, decay=0.1),
    "legacy sgd, norm of all clipped": lambda: tf_keras.optimizers.legacy.SGD(0.1, global_clipnorm=0.1),
    "legacy, scaled losses": lambda: tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.legacy.SGD(0.1)),
}
#: As others, but for their formula.
ONLY_FULL = (
    *("adadelta", "adagrad", "adamax, values clipped", "ftrl", "legacy adam", "lion", "rmsprop"),
    *("adamw", "adam, norm of each clipped", "legacy sgd, norm of all clipped", "nadam", "scaled losses"),
)


@pytest.mark.parametrize("name", params(OPTIMIZERS, ONLY_FULL))
def test_every_optimizer_is_applied_once_a_batch(init: Callable[..., None], name: str) -> None:
    init(microbatches=2)
    compare(classifier, PLAIN, EVEN, optimizer=OPTIMIZERS[name])


class Penalised(tf_keras.Sequential):
    """A `train_step` as Keras's guide has it: with a tape, and the optimizer and metrics used directly."""

    def __init__(self) -> None:
        super().__init__([layers.Dense(8, activation="tanh", input_shape=(6,)), layers.Dense(3)])
        self.tracker = tf_keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = tf.reduce_mean(tf_keras.losses.sparse_categorical_crossentropy(y, predicted, from_logits=True))
            loss += 0.01 * tf.add_n([tf.nn.l2_loss(v) for v in self.trainable_variables])
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 1e3)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss, sample_weight=tf.shape(x)[0])
        return {"loss": self.tracker.result(), "largest": tf.reduce_mean(tf.abs(predicted)), "constant": 3.0}


def test_a_train_step_of_the_users_own(init: Callable[..., None]) -> None:
    # The norm of the gradients, which it logs, is one of each microbatch.
    init(microbatches=3, check_losses=False)
    compare(Penalised, {}, ARRAYS)


def with_train_step(step: Callable[[Any, Any], Any]) -> Any:
    """A distributed model with a `train_step`, compiled."""

    class Net(smp.DistributedModel):
        def __init__(self) -> None:
            super().__init__(name="net")
            self.first, self.second = layers.Dense(4), layers.Dense(3)

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.second(self.first(x))

        def train_step(self, data: Any) -> Any:
            return step(self, data)

    model = Net()
    model.compile("sgd")
    return model


def _two_phases(model: Any, data: Any) -> dict[str, Any]:
    for layer in (model.second, model.first):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(data[0]) ** 2)
        model.optimizer.minimize(loss, layer.trainable_variables, tape)
    return {"loss": loss}


def test_a_second_phase_that_needs_the_weights_of_the_first_is_refused(init: Callable[..., None]) -> None:
    init(microbatches=2)
    with pytest.raises(StepError, match=r"reads 'net/dense_1/kernel.*two functions with @smp.step"):
        with_train_step(_two_phases).fit(X, CLASSES, verbose=0)


def _sometimes(model: Any, data: Any) -> dict[str, Any]:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(data[0]) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    if model.optimizer.iterations % 2 == 0:
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return {"loss": loss}


def test_gradients_applied_in_a_branch_are_refused(init: Callable[..., None]) -> None:
    init(microbatches=2)
    with pytest.raises(StepError, match=r"applies gradients inside a tf.cond"):
        with_train_step(_sometimes).fit(X, CLASSES, verbose=0)


def test_running_eagerly_is_refused(init: Callable[..., None]) -> None:
    init(microbatches=2)
    model = smp.DistributedModel(classifier)
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(StepError, match="cannot run eagerly"):
        model.fit(X, CLASSES, verbose=0)


def test_single_batches(init: Callable[..., None]) -> None:
    init(microbatches=2)
    plain, split = classifier(), smp.DistributedModel(classifier)
    split.set_weights(plain.get_weights())
    for model in (plain, split):
        compiled(model, PLAIN)
    for method in ("train_on_batch", "test_on_batch"):
        for given in ({"x": X[:8], "y": CLASSES[:8]}, {"x": X[8:14], "y": CLASSES[8:14], "return_dict": True}):
            ours, theirs = getattr(split, method)(**given), getattr(plain, method)(**given)
            np.testing.assert_allclose(*(list(o.values()) if isinstance(o, dict) else o for o in (ours, theirs)), 1e-5)
    np.testing.assert_allclose(split.predict_on_batch(X[:5]), plain.predict_on_batch(X[:5]), 1e-5)


def test_fewer_samples_than_microbatches_can_be_evaluated_and_predicted_at_once(init: Callable[..., None]) -> None:
    init(microbatches=3)
    plain, split = classifier(), smp.DistributedModel(classifier)
    split.set_weights(plain.get_weights())
    for model in (plain, split):
        compiled(model, PLAIN)
    np.testing.assert_allclose(split.predict(X[:1], verbose=0), plain.predict(X[:1], verbose=0), 1e-5)
    ours, theirs = (model.evaluate(X[:2], CLASSES[:2], verbose=0) for model in (split, plain))
    np.testing.assert_allclose(ours, theirs, 1e-5)
    with pytest.raises(StepError, match="first batch of step 'train_step' has 2 samples, fewer than the 3"):
        split.fit(X[:2], CLASSES[:2], verbose=0)


def test_compiling_again_takes_the_new_optimizer_and_what_is_frozen(init: Callable[..., None]) -> None:
    init(microbatches=2)
    plain, split = two_outputs(), smp.DistributedModel(two_outputs)
    split.set_weights(plain.get_weights())
    given = {"x": X[:16], "y": [CLASSES[:16], NUMBERS[:16]], "batch_size": 8}
    histories = []
    for model in (plain, split):
        compiled(model, {"loss": [FROM_LOGITS, "mse"]})
        fitted(model, given)
        for layer in model.layers[:-1]:
            layer.trainable = False
        model.get_layer("kind").trainable = True
        compiled(model, {"loss": [FROM_LOGITS, "mae"]}, tf_keras.optimizers.Adam(0.1))
        histories.append(fitted(model, given))
        assert [variable.name.split("/")[0] for variable in model.trainable_variables] == ["kind"] * 2 + ["size"] * 2
    assert histories[1].keys() == histories[0].keys()
    for name, values in histories[0].items():
        np.testing.assert_allclose(histories[1][name], values, rtol=1e-5, err_msg=name)


def test_a_model_that_was_compiled_before_it_is_wrapped_is_compiled(init: Callable[..., None]) -> None:
    init(microbatches=2)
    plain = compiled(classifier(), PLAIN)
    weights = plain.get_weights()
    split = smp.DistributedModel(lambda: compiled(classifier(), PLAIN))
    split.set_weights(weights)
    given = {**ARRAYS, "x": X[:16], "y": CLASSES[:16]}
    expected, found = fitted(plain, given), fitted(split, given)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, err_msg=name)


def test_a_model_that_is_subclassed_and_measured_in_its_call(init: Callable[..., None]) -> None:
    init(microbatches=3)

    def net(base: Any) -> Any:
        class Net(base):
            def __init__(self) -> None:
                super().__init__()
                initializer = tf_keras.initializers.GlorotUniform(7)
                self.first = layers.Dense(4, kernel_initializer=initializer)
                self.second = layers.Dense(3, kernel_initializer=initializer)

            def call(self, x: tf.Tensor) -> tf.Tensor:
                hidden = self.first(x)
                self.add_metric(tf.reduce_mean(hidden**2), name="activity")
                self.add_loss(0.1 * tf.reduce_mean(hidden**2))
                return self.second(hidden)

        return compiled(Net(), PLAIN)

    split, plain = net(smp.DistributedModel), net(tf_keras.Model)
    expected, found = (
        fitted(plain, {**ARRAYS, "x": X[:18], "y": CLASSES[:18], "batch_size": 6}),
        fitted(split, {**ARRAYS, "x": X[:18], "y": CLASSES[:18], "batch_size": 6}),
    )
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, err_msg=name)


def test_a_mask_made_of_weights_is_told_and_its_log_is_that_of_the_whole_batch(
    init: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    init(microbatches=2, check_losses=False)

    class OnlyPositive(layers.Layer):
        def compute_mask(self, inputs: tf.Tensor, mask: Any = None) -> tf.Tensor:
            return inputs[..., 0] > 0.0

        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            return tf.identity(inputs)

    inputs = tf_keras.Input((5, 3))
    hidden = OnlyPositive()(layers.Dense(4, kernel_initializer="ones", name="hidden")(inputs))
    model = smp.DistributedModel(
        tf_keras.Model(inputs, layers.Dense(1, kernel_initializer="ones", name="head")(hidden), name="masking")
    )
    model.compile("sgd", "mse")
    x = np.linspace(-1.0, 2.0, 60, dtype=np.float32).reshape(4, 5, 3)
    # Of the first two samples the last words of the first have no value, and all words of the last two have one: the
    # average over the valid words of each microbatch is another one.
    sums = x.sum(-1)
    loss = model.train_on_batch(x, np.ones((4, 5, 1), np.float32))
    assert loss == pytest.approx(np.mean(((4 * sums - 1.0) ** 2)[sums > 0]), rel=1e-5)
    assert "the mask of a loss depends on a variable (op 'hidden" in capfd.readouterr().err.replace("masking/", "")


def test_accuracy_over_a_sequence_is_that_over_the_same_arrays(init: Callable[..., None]) -> None:
    """Plain Keras takes another accuracy there, since it does not know that labels have one column."""

    class Columns(Sequence):
        def __getitem__(self, index: int) -> Any:
            inputs, labels = super().__getitem__(index)
            return inputs, labels[:, None]

    init(microbatches=2)
    found = []
    for data in ({"x": Columns()}, {"x": X[:20], "y": CLASSES[:20, None], "batch_size": 5}):
        tf_keras.utils.set_random_seed(1)
        model = smp.DistributedModel(classifier)
        model.compile("sgd", **PLAIN)
        found.append(model.fit(**data, shuffle=False, verbose=0).history)
    assert found[0]["accuracy"] == pytest.approx(found[1]["accuracy"])
    assert found[0]["loss"] == pytest.approx(found[1]["loss"])
