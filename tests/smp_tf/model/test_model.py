"""Distributed models in one process: every way to make one, how they are called, and what they refuse."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.errors import NotInitializedError, OwnershipError, StepError
from smp_tf.variables.guarded import DeferredVariable
from smp_tf.variables.store import store_of

SEED = 5
X = np.arange(12, dtype=np.float32).reshape(4, 3) / 10.0


@pytest.fixture(autouse=True)
def _initialised(init: Callable[..., None]) -> None:
    init(microbatches=2, seed=SEED)


def net_of(base: type[Any]) -> type[Any]:
    """The same model as a subclass of a class."""

    class Net(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="net")
            self.hidden = layers.Dense(4, activation="tanh")
            self.head = layers.Dense(2)

        def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
            return self.head(self.hidden(x))

    return Net


Net = net_of(smp.DistributedModel)
PlainNet = net_of(tf_keras.Model)


def functional() -> tf_keras.Model:
    inputs = layers.Input((3,))
    return tf_keras.Model(inputs, layers.Dense(2)(layers.Dense(4, activation="tanh")(inputs)), name="net")


def sequential() -> tf_keras.Model:
    return tf_keras.Sequential([layers.Dense(4, activation="tanh"), layers.Dense(2)], name="net")


def predictions(model: smp.DistributedModel, x: Any = X, **kwargs: Any) -> np.ndarray:
    """What a model says inside a step, for the whole batch."""

    @smp.step
    def predict(x: Any) -> tf.Tensor:
        return model(x, **kwargs)

    return predict(x).concat().numpy()


def expected(make: Callable[[], tf_keras.Model]) -> np.ndarray:
    """What a plain model says that is made from the same seed."""
    tf_keras.utils.set_random_seed(SEED)
    return make()(X).numpy()


def with_seed(make: Callable[[], Any]) -> Any:
    tf_keras.utils.set_random_seed(SEED)
    return make()


class TestEveryForm:
    @pytest.mark.parametrize(
        ("plain", "distributed"),
        [
            (PlainNet, Net),
            (functional, lambda: smp.DistributedModel(functional())),
            (functional, lambda: smp.DistributedModel(functional)),
            (sequential, lambda: smp.DistributedModel(sequential())),
            (sequential, lambda: smp.DistributedModel(sequential)),
            (PlainNet, lambda: smp.DistributedModel(PlainNet())),
            (PlainNet, lambda: smp.DistributedModel(PlainNet)),
        ],
        ids=[
            "subclass", "functional", "functional builder", "sequential", "sequential builder",
            "plain subclass", "plain subclass builder",
        ],
    )  # fmt: skip
    def test_says_what_the_plain_model_says_from_the_same_seed(
        self, plain: Callable[[], Any], distributed: Callable[[], Any]
    ) -> None:
        model = with_seed(distributed)
        assert model.name == "net"
        assert predictions(model) == pytest.approx(expected(plain), rel=1e-6)
        assert len(model.local_variables) == len(model.variables) == 4

    @pytest.mark.parametrize(
        "make", [Net, lambda: smp.DistributedModel(functional), lambda: smp.DistributedModel(sequential)]
    )
    def test_has_no_storage_before_the_first_step(self, make: Callable[[], Any]) -> None:
        model = make()
        model.build((None, 3))
        assert [type(v) for v in model.variables] == [DeferredVariable] * 4
        with pytest.raises(OwnershipError, match="is decided at the first call of a step"):
            model.variables[0].numpy()
        predictions(model)
        assert model.variables[0].numpy().shape == (3, 4)

    def test_a_built_model_keeps_its_weights(self) -> None:
        plain = functional()
        before = plain(X).numpy()
        model = smp.DistributedModel(plain)
        assert predictions(model) == pytest.approx(before, rel=1e-6)
        assert model.wrapped is plain

    def test_trains_as_the_plain_model_does(self) -> None:
        model, plain = with_seed(Net), PlainNet()
        model.build((None, 3))
        with_seed(lambda: plain.build((None, 3)))

        @smp.step
        def train(x: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x, training=True) ** 2)
            return tape.gradient(loss, model.trainable_variables), loss

        optimizer, reference = tf_keras.optimizers.SGD(0.5), tf_keras.optimizers.SGD(0.5)
        for _ in range(2):
            gradients, loss = train(X)
            optimizer.apply_gradients(zip([g.accumulate() for g in gradients], model.trainable_variables, strict=True))
            with tf.GradientTape() as tape:
                told = tf.reduce_mean(plain(X, training=True) ** 2)
            reference.apply_gradients(
                zip(tape.gradient(told, plain.trainable_variables), plain.trainable_variables, strict=True)
            )
            assert float(loss.reduce_mean()) == pytest.approx(float(told), rel=1e-5)
        for ours, theirs in zip(model.variables, plain.variables, strict=True):
            assert ours.numpy() == pytest.approx(theirs.numpy(), abs=1e-6), ours.name


class TestReadsWhileBuilt:
    """Keras calls the layers of a functional model in a graph of its own while the model is being constructed."""

    @staticmethod
    def tied() -> tf_keras.Model:
        tokens = layers.Input((3,), dtype=tf.int32)
        embedding = layers.Embedding(5, 4, name="tokens")
        x = layers.Dense(4)(embedding(tokens))
        # Reads the weight at once: the op is written into Keras's own graph.
        logits = tf.matmul(x, embedding.embeddings, transpose_b=True)
        return tf_keras.Model(tokens, logits)

    @pytest.mark.parametrize("form", ["builder", "subclass"])
    def test_a_functional_model_that_reads_weights_while_it_is_built(self, form: str) -> None:
        tied = self.tied

        class Tied(smp.DistributedModel):
            def __init__(self) -> None:
                super().__init__()
                self.body = tied()

            def call(self, x: tf.Tensor) -> tf.Tensor:
                return self.body(x)

        tokens = np.array([[0, 1, 2], [3, 4, 0]], np.int32)
        reference = with_seed(tied)(tokens).numpy()
        model = with_seed(Tied if form == "subclass" else lambda: smp.DistributedModel(tied))
        assert predictions(model, tokens) == pytest.approx(reference, rel=1e-5, abs=1e-7)

    def test_a_layer_with_weights_is_called_in_keras_s_graph_without_storage(self) -> None:
        model = smp.DistributedModel(functional)
        assert [v.shape.as_list() for v in model.variables] == [[3, 4], [4], [4, 2], [2]]
        assert [type(v) for v in model.variables] == [DeferredVariable] * 4


class TestArguments:
    def test_a_wrapped_subclass_whose_call_takes_neither_training_nor_mask(self) -> None:
        class Bare(tf_keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.dense = layers.Dense(2, kernel_initializer="ones")

            def call(self, x: tf.Tensor) -> tf.Tensor:
                return self.dense(x)

        model = smp.DistributedModel(Bare)
        assert predictions(model) == pytest.approx(X.sum(1, keepdims=True).repeat(2, 1))
        assert predictions(smp.DistributedModel(Bare()), training=True).shape == (4, 2)

        @smp.step
        def masked(x: tf.Tensor) -> tf.Tensor:
            return model(layers.Masking()(x))  # Keras hands the mask to every call that takes one

        assert masked(X).concat().numpy() == pytest.approx(predictions(model))

    @pytest.mark.parametrize("training", [True, False])
    def test_training_reaches_a_wrapped_model_that_takes_it(self, training: bool) -> None:
        seen = []

        class Asks(tf_keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.dense = layers.Dense(2)

            def call(self, x: tf.Tensor, training: bool | None = None) -> tf.Tensor:
                seen.append(training)
                return self.dense(x)

        predictions(smp.DistributedModel(Asks), training=training)
        assert set(seen) == {training}

    def test_other_keyword_arguments_reach_the_wrapped_model(self) -> None:
        class Scales(tf_keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.dense = layers.Dense(1, kernel_initializer="ones")

            def call(self, x: tf.Tensor, scale: float = 1.0) -> tf.Tensor:
                return self.dense(x) * scale

        model = smp.DistributedModel(Scales)
        assert predictions(model, scale=2.0) == pytest.approx(2.0 * X.sum(1, keepdims=True), rel=1e-6)

    def test_the_first_argument_of_a_wrapped_model_may_be_given_by_name(self) -> None:
        class Adds(tf_keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.dense = layers.Dense(1, kernel_initializer="ones")

            def call(self, left: tf.Tensor, right: tf.Tensor | None = None) -> tf.Tensor:
                return self.dense(left if right is None else left + right)

        model = smp.DistributedModel(Adds)

        @smp.step
        def by_name(x: tf.Tensor) -> tf.Tensor:
            return model(right=x, left=x)

        assert by_name(X).concat().numpy() == pytest.approx(2 * X.sum(1, keepdims=True), rel=1e-6)

        @smp.step
        def without(x: tf.Tensor) -> tf.Tensor:
            return model(right=x)

        words = "Keras needs the first argument of a model's call, which is 'left' for 'adds'. Received: 'right'"
        with pytest.raises(ValueError, match=re.escape(words)):
            without(X)

    def test_outputs_that_are_a_mapping_with_attributes_keep_their_class(self) -> None:
        class Outputs(OrderedDict):  # as libraries of models return it
            def __setitem__(self, key: str, value: Any) -> None:
                super().__setitem__(key, value)
                object.__setattr__(self, key, value)

        class Two(smp.DistributedModel):
            def __init__(self) -> None:
                super().__init__()
                self.dense = layers.Dense(1, kernel_initializer="ones")

            def call(self, x: tf.Tensor) -> Outputs:
                return Outputs(logits=self.dense(x), states=(x, 2 * x))

        model = Two()

        @smp.step
        def predict(x: tf.Tensor) -> Any:
            return model(x)

        found = predict(X)
        assert type(found) is Outputs
        assert found.logits.concat().numpy() == pytest.approx(X.sum(1, keepdims=True), rel=1e-6)
        assert found.states[1].concat().numpy().tolist() == (2 * X).tolist()

    def test_a_subclass_with_a_dictionary_of_inputs(self) -> None:
        class Two(smp.DistributedModel):
            def __init__(self) -> None:
                super().__init__()
                self.left = layers.Dense(2, kernel_initializer="ones")
                self.right = layers.Dense(2, kernel_initializer="ones")

            def call(self, inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
                return {"sum": self.left(inputs["a"]) + self.right(inputs["b"]), "a": inputs["a"]}

        model = Two()

        @smp.step
        def predict(batch: dict[str, tf.Tensor]) -> Any:
            return model(batch)

        found = predict({"a": X, "b": 2 * X})
        assert found["sum"].concat().numpy() == pytest.approx(3 * X.sum(1, keepdims=True).repeat(2, 1), rel=1e-6)
        assert found["a"].concat().numpy().tolist() == X.tolist()

    def test_a_functional_model_of_several_inputs_and_outputs(self) -> None:
        def build() -> tf_keras.Model:
            a, b = layers.Input((3,), name="a"), layers.Input((3,), name="b")
            one = layers.Dense(2, kernel_initializer="ones")(a)
            return tf_keras.Model([a, b], [one, layers.Add()([one, layers.Dense(2, kernel_initializer="ones")(b)])])

        model = smp.DistributedModel(build)

        @smp.step
        def predict(a: tf.Tensor, b: tf.Tensor) -> Any:
            return model([a, b])

        one, both = predict(X, X)
        assert both.concat().numpy() == pytest.approx(2 * one.concat().numpy(), rel=1e-6)


class TestNested:
    def test_a_plain_model_in_a_distributed_one(self) -> None:
        class Outer(smp.DistributedModel):
            def __init__(self) -> None:
                super().__init__()
                self.inner = PlainNet()

            def call(self, x: tf.Tensor) -> tf.Tensor:
                return self.inner(x)

        model = with_seed(Outer)
        assert predictions(model) == pytest.approx(expected(PlainNet), rel=1e-6)
        assert len(model.local_variables) == 4

    def test_a_distributed_model_in_a_distributed_one(self) -> None:
        class Outer(smp.DistributedModel):
            def __init__(self) -> None:
                super().__init__()
                self.inner = Net()
                self.last = layers.Dense(2, kernel_initializer="identity")

            def call(self, x: tf.Tensor) -> tf.Tensor:
                return self.last(self.inner(x))

        model = with_seed(Outer)
        assert predictions(model) == pytest.approx(expected(PlainNet), rel=1e-6)
        assert len(model.variables) == 6
        assert len(model.local_variables) == 6
        assert len(model.inner.local_variables) == 4

    def test_layers_shared_by_two_models_train_with_both(self) -> None:
        encoder = [layers.Dense(4, activation="tanh"), layers.Dense(2)]

        class Uses(smp.DistributedModel):
            def __init__(self) -> None:
                super().__init__()
                self.encoder = encoder
                self.head = layers.Dense(2)

            def call(self, x: tf.Tensor) -> tf.Tensor:
                for layer in self.encoder:
                    x = layer(x)
                return self.head(x)

        one, other = Uses(), Uses()
        predictions(one)
        before = encoder[0].kernel.numpy()
        predictions(other)
        assert encoder[0].kernel.numpy().tolist() == before.tolist()
        assert len(other.local_variables) == 6

        @smp.step
        def train(x: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(other(x) ** 2)
            return tape.gradient(loss, other.trainable_variables)

        gradients = [g.accumulate() for g in train(X)]
        tf_keras.optimizers.SGD(0.5).apply_gradients(zip(gradients, other.trainable_variables, strict=True))
        assert encoder[0].kernel.numpy().tolist() != before.tolist()
        plain = one.head(encoder[1](encoder[0](X))).numpy()
        assert predictions(one) == pytest.approx(plain, abs=1e-6)

    def test_weights_made_in_the_model_itself(self) -> None:
        class Scaled(smp.DistributedModel):
            def __init__(self) -> None:
                super().__init__()
                self.scale = tf.Variable(lambda: tf.constant(3.0), name="scale")
                self.shift = self.add_weight("shift", (3,), initializer="ones")

            def call(self, x: tf.Tensor) -> tf.Tensor:
                return x * self.scale + self.shift

        model = Scaled()
        assert predictions(model) == pytest.approx(3 * X + 1, rel=1e-6)
        assert sorted(v.name for v in model.local_variables) == ["scale:0", "shift:0"]


class TestOutsideAStep:
    @pytest.mark.parametrize("x", [tf.constant(X), X], ids=["tensor", "array"])
    def test_a_call_is_an_error_that_says_what_to_do(self, x: Any) -> None:
        with pytest.raises(StepError) as raised:
            Net()(x)
        assert str(raised.value) == (
            "Model 'net' was called outside a step. Its layers live on different ranks, so it can be called only "
            "inside a function decorated with @smp.step, which smp_tf cuts."
        )

    def test_also_in_a_function_and_after_a_step(self) -> None:
        model = Net()
        predictions(model)
        with pytest.raises(StepError, match="outside a step"):
            tf.function(lambda x: model(x))(tf.constant(X))

    def test_symbolic_inputs_build_it(self) -> None:
        model = Net()
        inputs = layers.Input((3,))
        assert model(inputs).shape.as_list() == [None, 2]
        assert [type(v) for v in model.variables] == [DeferredVariable] * 4

    def test_build_makes_the_variables_and_the_step_uses_them(self) -> None:
        model = with_seed(Net)
        assert model.variables == []
        model.build((None, 3))
        made = [id(v) for v in model.variables]
        assert predictions(model) == pytest.approx(expected(PlainNet), rel=1e-6)
        assert [id(v) for v in model.variables] == made

    @pytest.mark.parametrize("make", [functional, sequential, PlainNet])
    def test_build_of_a_wrapped_model_makes_the_variables_too(self, make: Callable[[], tf_keras.Model]) -> None:
        model = with_seed(lambda: smp.DistributedModel(make))
        model.build((None, 3))
        assert model.built
        assert [type(v) for v in model.variables] == [DeferredVariable] * 4
        assert predictions(model) == pytest.approx(expected(make), rel=1e-6)

    def test_a_summary_can_be_printed_once_it_is_built(self, capsys: pytest.CaptureFixture[str]) -> None:
        model = Net()
        model.build((None, 3))
        model.summary()
        assert "Total params: 26" in capsys.readouterr().out

    @pytest.mark.parametrize("name", ["local_variables", "local_trainable_variables"])
    def test_who_stores_what_is_not_known_before_a_step(self, name: str) -> None:
        model = Net()
        model.build((None, 3))
        with pytest.raises(StepError, match=r"is decided at the first call of a step .*register_post_partition_hook"):
            getattr(model, name)

    def test_local_trainable_variables_leave_out_frozen_ones(self) -> None:
        model = Net()
        model.hidden.trainable = False
        predictions(model)
        assert [v.shape.as_list() for v in model.local_trainable_variables] == [[4, 2], [2]]
        assert len(model.local_variables) == 4


class TestStateOfTheScript:
    class Measured(smp.DistributedModel):
        def __init__(self) -> None:
            super().__init__(name="net")
            self.head = layers.Dense(2, kernel_initializer="ones")
            self.seen = tf_keras.metrics.Mean()
            self.listed = [tf_keras.metrics.Sum()]

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.head(x)

    def test_a_metric_that_a_model_makes_belongs_to_the_script(self) -> None:
        model = self.Measured()
        states = [*model.seen.variables, *model.listed[0].variables]
        assert [v.numpy() for v in states] == [0.0, 0.0, 0.0]

        @smp.step
        def measure(x: tf.Tensor) -> tf.Tensor:
            y = model(x)
            model.seen.update_state(y)
            model.listed[0].update_state(x)
            return y

        expected = measure(X).concat().numpy().mean()
        assert [store_of(v) for v in states] == [None, None, None]
        assert float(model.seen.result()) == pytest.approx(expected, rel=1e-6)
        assert float(model.listed[0].result()) == pytest.approx(X.sum(), rel=1e-6)
        assert [v is w for v, w in zip(model.local_variables, model.variables, strict=True)] == [True] * 5
        model.seen.reset_state()
        assert float(model.seen.total) == 0.0

    def test_a_model_with_a_metric_is_saved_with_its_state(self, tmp_path: Path) -> None:
        model = self.Measured()
        predictions(model)
        model.seen.update_state([2.0, 4.0])
        model.save_model(tmp_path / "saved")
        loaded = tf_keras.models.load_model(tmp_path / "saved")
        assert [v.numpy().tolist() for v in loaded.variables[2:]] == [6.0, 2.0, 0.0]

    @pytest.mark.parametrize("built", [False, True], ids=["unbuilt", "built"])
    def test_normalization_adapts_to_data_while_a_model_is_constructed(self, built: bool) -> None:
        def adapted() -> Any:
            layer = layers.Normalization()
            if built:
                layer.build((None, 3))
            layer.adapt(X)
            return layer

        class Adapts(smp.DistributedModel):
            def __init__(self) -> None:
                super().__init__()
                self.normal = adapted()
                self.head = layers.Dense(2, kernel_initializer="ones")

            def call(self, x: tf.Tensor) -> tf.Tensor:
                return self.head(self.normal(x))

        model = Adapts()
        expected = adapted()(X).numpy().sum(axis=1)
        assert predictions(model)[:, 0] == pytest.approx(expected, abs=1e-5)
        assert model.normal.adapt_mean.numpy() == pytest.approx(X.mean(axis=0))
        assert store_of(model.normal.adapt_mean) is model._smp_store

    def test_normalization_adapts_after_construction_and_before_the_first_step(self) -> None:
        model = smp.DistributedModel(lambda: tf_keras.Sequential([layers.Normalization(), layers.Dense(2)]))
        model.wrapped.layers[0].adapt(X)
        predictions(model)
        assert model.wrapped.layers[0].adapt_mean.numpy() == pytest.approx(X.mean(axis=0))

    def test_a_functional_model_with_a_normalization_that_was_not_adapted(self) -> None:
        def build() -> tf_keras.Model:
            inputs = layers.Input((3,))
            return tf_keras.Model(inputs, layers.Dense(2)(layers.Normalization()(inputs)))

        model = with_seed(lambda: smp.DistributedModel(build))
        assert predictions(model) == pytest.approx(expected(build), rel=1e-6)

    def test_a_layer_with_variables_without_storage_adapts(self) -> None:
        def adapted() -> Any:
            layer = layers.Discretization(num_bins=3)
            layer.build((None, 3))
            layer.adapt(X)
            return layer

        class Adapts(smp.DistributedModel):
            def __init__(self) -> None:
                super().__init__()
                self.bins = adapted()
                self.head = layers.Dense(2)

        assert Adapts().bins.bin_boundaries == adapted().bin_boundaries


class TestRefused:
    def test_before_init(self) -> None:
        smp.shutdown()
        with pytest.raises(NotInitializedError, match=r"smp_tf is not initialised\. Call smp\.init"):
            Net()
        with pytest.raises(NotInitializedError):
            smp.DistributedModel(functional)

    @pytest.mark.parametrize(
        "arguments", [(), (3,), ("net",), (functional, functional)], ids=["none", "3", "net", "two"]
    )
    def test_anything_but_one_model_or_function(self, arguments: tuple[Any, ...]) -> None:
        with pytest.raises(TypeError, match="is either subclassed or given one Keras model, or one function"):
            smp.DistributedModel(*arguments)

    def test_a_function_that_returns_no_model(self) -> None:
        with pytest.raises(TypeError, match=r"The function returned 3 \(of type int\)"):
            smp.DistributedModel(lambda: 3)

    def test_wrapping_twice(self) -> None:
        with pytest.raises(TypeError, match="'net' is a distributed model already; it cannot be wrapped again"):
            smp.DistributedModel(Net())
