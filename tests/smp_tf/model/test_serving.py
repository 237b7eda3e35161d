"""The signature of a saved model takes the batches of the steps, and names inputs and outputs as plain Keras does."""

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

pytestmark = [pytest.mark.large, pytest.mark.usefixtures("keras_defaults")]

NUMBERS = np.arange(12, dtype=np.float64).reshape(4, 3) / 10.0
X64, X32 = tf.constant(NUMBERS), tf.constant(NUMBERS, tf.float32)
IDS = tf.constant([[1, 2], [3, 4], [5, 6], [1, 2]], tf.int64)
TEXT = tf.constant(["a", "b", "c", "a"])


@pytest.fixture(autouse=True)
def _initialised(init: Callable[..., None]) -> None:
    init(microbatches=2)


def subclass(call: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """Returns what makes a subclass of a base, whose layers are called by a function."""

    def make(base: Any) -> Any:
        class Net(base):
            def __init__(self) -> None:
                super().__init__(name="net")
                self.words = layers.Embedding(10, 3, name="words")
                self.lookup = layers.StringLookup(vocabulary=["a", "b"], name="lookup")
                self.scale = layers.Rescaling(0.25, name="scale")
                self.first = layers.Dense(2, name="first")
                self.second = layers.Dense(1, name="second")

            def call(self, x: Any) -> Any:
                return call(self, x)

        return Net()

    return make


def wrapped(build: Callable[[], Any]) -> Callable[[Any], Any]:
    """Returns what makes a model with a function, distributed or plain."""
    return lambda base: build() if base is tf_keras.Model else smp.DistributedModel(build)


def functional(*shape: int | None, dtype: str | None = None, outputs: int = 1) -> Any:
    inputs = layers.Input(shape, name="feat", dtype=dtype)
    heads = [layers.Dense(2, name=f"head{number}")(inputs) for number in range(outputs)]
    return tf_keras.Model(inputs, heads if outputs > 1 else heads[0], name="net")


def of_two(as_dict: bool) -> Any:
    inputs = {name: layers.Input((3,), name=name) for name in "uv"}
    head = layers.Dense(2, name="head")(layers.Concatenate()(list(inputs.values())))
    return tf_keras.Model(inputs if as_dict else list(inputs.values()), head, name="net")


def of_ids(ragged: bool) -> Any:
    inputs = layers.Input((None,), name="ids", dtype="int32", ragged=ragged)
    rows = layers.Lambda(lambda x: tf.reduce_mean(x, 1))(layers.Embedding(10, 4)(inputs))
    return tf_keras.Model(inputs, layers.Dense(2, name="head")(rows), name="net")


def of_images() -> Any:
    inputs = layers.Input((4, 4, 1), name="image")
    convolved = layers.Conv2D(2, 2)(layers.Rescaling(1 / 255)(inputs))
    return tf_keras.Model(inputs, layers.Dense(2, name="head")(layers.Flatten()(convolved)), name="net")


def sequential() -> Any:
    return tf_keras.Sequential([layers.Dense(2, name="head")], name="net")


#: What makes a model, what it is fed, and the types of the signature's inputs; their names and outputs are Keras's.
CASES: dict[str, tuple[Callable[[Any], Any], Any, list[str]]] = {
    "subclass float64": (subclass(lambda net, x: net.first(x)), X64, ["float64"]),
    "subclass uint8": (subclass(lambda net, x: net.first(net.scale(x))), tf.cast(X64 * 10, tf.uint8), ["uint8"]),
    "subclass text": (subclass(lambda net, x: net.words(net.lookup(x))), TEXT, ["string"]),
    "subclass dict": (
        subclass(lambda net, x: net.first(x["u"]) + net.second(x["v"])), {"u": X64, "v": X32}, ["float64", "float32"]
    ),
    "subclass tuple": (
        subclass(lambda net, x: net.first(x[0]) + tf.reduce_sum(net.words(x[1]), (1, 2))[:, None]),
        (X64, IDS),
        ["float64", "int64"],
    ),
    "subclass two outputs": (subclass(lambda net, x: (net.first(x), net.second(x))), X64, ["float64"]),
    "subclass dict of outputs": (
        subclass(lambda net, x: {"p": net.first(x), "q": net.second(x)}), X64, ["float64"]
    ),
    "functional float64": (wrapped(lambda: functional(3)), X64, ["float64"]),
    "functional of float64": (wrapped(lambda: functional(3, dtype="float64")), X64, ["float64"]),
    "functional integers": (wrapped(lambda: functional(3)), tf.cast(X64 * 10, tf.int32), ["int32"]),
    "functional two outputs": (wrapped(lambda: functional(3, outputs=2)), X64, ["float64"]),
    "functional dict": (wrapped(lambda: of_two(True)), {"u": X64, "v": X32}, ["float64", "float32"]),
    "functional list": (wrapped(lambda: of_two(False)), [X64, X32], ["float64", "float32"]),
    "functional list by name": (wrapped(lambda: of_two(False)), {"v": X32, "u": X64}, ["float64", "float32"]),
    "functional int64 ids": (wrapped(lambda: of_ids(False)), IDS, ["int64"]),
    "functional ragged": (
        wrapped(lambda: of_ids(True)), tf.ragged.constant([[1, 2], [3], [5, 6, 7], [1]], tf.int64), ["int64", "int64"]
    ),
    "functional images": (
        wrapped(of_images), tf.constant(np.arange(64).reshape(4, 4, 4, 1), tf.uint8), ["uint8"]
    ),
    "sequential": (wrapped(sequential), X64, ["float64"]),
}  # fmt: skip
#: What the default run runs; the others run with --full.
USUAL = ("subclass dict", "functional float64")


def signature_of(model: Any, path: Path) -> Any:
    model.save(path)
    # The signature needs the model that was loaded.
    loaded = tf.saved_model.load(path)
    return loaded, loaded.signatures["serving_default"]


def flat(batch: Any) -> list[Any]:
    return tf.nest.flatten(batch, expand_composites=True)


def own_loop(model: Any, *batches: Any, **options: Any) -> Any:
    @smp.step(**options)
    def step(x: Any) -> Any:
        return model(x)

    for batch in batches:
        given = step(batch)
    return given


@pytest.mark.parametrize("case", [pytest.param(name, marks=[pytest.mark.full] * (name not in USUAL)) for name in CASES])
def test_it_takes_what_a_step_was_fed_and_names_all_as_keras_does(case: str, tmp_path: Path) -> None:
    make, batch, types = CASES[case]
    plain, model = make(tf_keras.Model), make(smp.DistributedModel)
    wanted = plain(batch)
    own_loop(model, batch)
    model.set_weights(plain.get_weights())
    _, theirs = signature_of(plain, tmp_path / "plain")
    _loaded, ours = signature_of(model, tmp_path / "ours")
    inputs, names = ours.structured_input_signature[1], theirs.structured_input_signature[1]
    assert sorted(inputs) == sorted(names)
    assert [inputs[name].dtype.name for name in sorted(inputs)] == types
    assert [inputs[name].shape.as_list() for name in sorted(inputs)] == [
        names[n].shape.as_list() for n in sorted(names)
    ]
    one_more = {"output_0"} if len(theirs.structured_outputs) == 1 else set()
    assert set(ours.structured_outputs) == set(theirs.structured_outputs) | one_more
    tensors = flat(batch)
    given = ours(tensors[0]) if len(tensors) == 1 else ours(**dict(zip(sorted(inputs), tensors, strict=True)))
    for name, output in zip(sorted(theirs.structured_outputs), flat(wanted), strict=True):
        assert given[name].numpy() == pytest.approx(output.numpy(), abs=1e-6)
    if one_more:
        assert given["output_0"].numpy() == pytest.approx(flat(wanted)[0].numpy(), abs=1e-6)


FITTED: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "subclass": (CASES["subclass float64"][0], True),
    "functional": (CASES["functional float64"][0], True),
    "wrapped subclass": (wrapped(lambda: CASES["subclass float64"][0](tf_keras.Model)), False),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.full] * of) for kind, (_, of) in FITTED.items()]
)
def test_it_takes_the_batches_of_a_data_set_that_fit_was_given(kind: str, tmp_path: Path) -> None:
    model = FITTED[kind][0](smp.DistributedModel)
    model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensor_slices((X64, tf.zeros([4, 2], tf.float64))).batch(4)
    model.fit(data, epochs=1, verbose=0)
    # What is fed later in another type does not change it.
    said = model.predict(X32, verbose=0)
    _loaded, serve = signature_of(model, tmp_path / "saved")
    [batch] = [x for x, _ in data]
    assert serve(batch)["output_0"].numpy() == pytest.approx(said, abs=1e-6)


@pytest.mark.full
def test_of_several_lengths_it_takes_all(tmp_path: Path) -> None:
    model = subclass(lambda net, x: net.first(tf.reduce_mean(net.words(x), 1)))(smp.DistributedModel)
    longer = tf.concat([IDS, IDS], 1)
    said = own_loop(model, IDS, longer).concat().numpy()
    _loaded, serve = signature_of(model, tmp_path / "saved")
    assert serve(longer)["output_0"].numpy() == pytest.approx(said, abs=1e-6)
    assert serve(IDS)["output_0"].shape == (4, 2)


@pytest.mark.full
def test_the_number_of_samples_is_open_on_the_axis_that_is_cut(tmp_path: Path) -> None:
    model = subclass(lambda net, x: net.first(tf.reduce_mean(x, 0)))(smp.DistributedModel)
    batch = tf.stack([X64, X64 + 1.0, X64 - 0.5])
    said = own_loop(model, batch, input_split_axes={"x": 1}).concat().numpy()
    _loaded, serve = signature_of(model, tmp_path / "saved")
    assert serve(batch)["output_0"].numpy() == pytest.approx(said, abs=1e-6)
    assert serve(batch[:, :3])["output_0"].shape == (3, 2)


@pytest.mark.full
def test_an_argument_by_name_is_taken_as_it_was_fed(tmp_path: Path) -> None:
    class Net(smp.DistributedModel):
        def __init__(self) -> None:
            super().__init__(name="net")
            self.dense = layers.Dense(2)

        def call(self, x: tf.Tensor, mask_of_words: tf.Tensor | None = None) -> tf.Tensor:
            return self.dense(x * tf.cast(mask_of_words, x.dtype))

    model = Net()

    @smp.step
    def step(x: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
        return model(x, mask_of_words=mask)

    mask = tf.constant([[True, False, True]] * 4)
    said = step(X64, mask).concat().numpy()
    _loaded, serve = signature_of(model, tmp_path / "saved")
    inputs = serve.structured_input_signature[1]
    assert {spec.dtype.name for spec in inputs.values()} == {"float64", "bool"}
    given = {name: mask if spec.dtype == tf.bool else X64 for name, spec in inputs.items()}
    assert serve(**given)["output_0"].numpy() == pytest.approx(said, abs=1e-6)


@pytest.mark.full
def test_a_profile_is_no_step(tmp_path: Path) -> None:
    model = CASES["functional float64"][0](smp.DistributedModel)
    model.profile(X32)
    own_loop(model, X64)
    _loaded, serve = signature_of(model, tmp_path / "saved")
    assert serve.structured_input_signature[1]["feat"].dtype == tf.float64


class TestMixedPrecision:
    @pytest.fixture(autouse=True)
    def _policy(self) -> Any:
        tf_keras.mixed_precision.set_global_policy("mixed_bfloat16")
        yield
        tf_keras.mixed_precision.set_global_policy("float32")

    @pytest.mark.full
    def test_it_takes_the_numbers_before_they_are_rounded(self, tmp_path: Path) -> None:
        model = CASES["subclass float64"][0](smp.DistributedModel)
        own_loop(model, X32)
        _loaded, serve = signature_of(model, tmp_path / "saved")
        assert serve.structured_input_signature[1]["input_1"].dtype == tf.float32
        assert serve(X32)["output_0"].dtype == tf.bfloat16

    def test_a_wrapped_model_gets_numbers_that_are_not_rounded(self) -> None:
        def build() -> Any:
            inputs = layers.Input((3,))
            return tf_keras.Model(
                inputs, layers.Dense(2, dtype="float32")(layers.Rescaling(1.0, dtype="float32")(inputs))
            )

        plain, model = build(), smp.DistributedModel(build)
        own_loop(model, X32)
        model.set_weights(plain.get_weights())
        assert np.array_equal(own_loop(model, X32).concat().numpy(), plain(X32).numpy())


def test_a_loaded_model_takes_what_keras_would_let_it_take(tmp_path: Path) -> None:
    model = CASES["subclass float64"][0](smp.DistributedModel)
    said = own_loop(model, X64).concat().numpy()
    model.save(tmp_path / "saved")
    assert tf_keras.models.load_model(tmp_path / "saved")(X64).numpy() == pytest.approx(said, abs=1e-6)
