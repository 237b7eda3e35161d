"""A saved model is whole, has the weights of now, and is a plain Keras model when it is loaded."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.errors import RankMismatchError, StepError
from smp_tf.files import durable_files
from smp_tf.job import channel as control_channel
from smp_tf.job import runtime
from smp_tf.job.channel import ControlChannel
from smp_tf.model import saving
from smp_tf.partition.mesh import Mesh
from smp_tf.variables import fetch
from smp_tf.watch.deadlock import DeadlockWatch

pytestmark = pytest.mark.large

X = np.arange(12, dtype=np.float32).reshape(4, 3) / 10.0


@pytest.fixture(autouse=True)
def _initialised(init: Callable[..., None]) -> None:
    init(microbatches=2)


class Net(smp.DistributedModel):
    def __init__(self) -> None:
        super().__init__(name="net")
        self.hidden = layers.Dense(4, activation="tanh")
        self.normal = layers.BatchNormalization()
        self.drop = layers.Dropout(0.5)
        self.head = layers.Dense(2)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        return self.head(self.drop(self.normal(self.hidden(x), training=training), training=training))


def functional() -> tf_keras.Model:
    inputs = layers.Input((3,))
    hidden = layers.Dense(4, activation="tanh")(inputs)
    return tf_keras.Model(inputs, layers.Concatenate()([hidden, layers.Dense(2)(hidden)]), name="net")


def sequential() -> tf_keras.Model:
    return tf_keras.Sequential([layers.Input((3,)), layers.Dense(4, activation="tanh"), layers.Dense(2)], name="net")


FORMS = {
    "subclass": Net,
    "functional builder": lambda: smp.DistributedModel(functional),
    "functional": lambda: smp.DistributedModel(functional()),
    "sequential builder": lambda: smp.DistributedModel(sequential),
}


def prediction_of(model: smp.DistributedModel) -> np.ndarray:
    @smp.step
    def predict(x: tf.Tensor) -> tf.Tensor:
        return model(x, training=False)

    return predict(X).concat().numpy()


def train(model: smp.DistributedModel) -> None:
    @smp.step
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    optimizer = tf_keras.optimizers.SGD(0.5)
    optimizer.apply_gradients(zip([g.accumulate() for g in step(X)], model.trainable_variables, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_the_loaded_model_says_what_the_trained_one_says(form: str, tmp_path: Path) -> None:
    model = FORMS[form]()
    train(model)
    expected = prediction_of(model)
    model.save_model(tmp_path / "saved")
    loaded = tf_keras.models.load_model(tmp_path / "saved")
    assert not isinstance(loaded, smp.DistributedModel)
    assert loaded(X, training=False).numpy() == pytest.approx(expected, abs=1e-6)
    for ours, theirs in zip(model.variables, loaded.variables, strict=True):
        assert ours.numpy().tolist() == theirs.numpy().tolist(), ours.name


def test_a_loaded_functional_model_is_one_and_can_be_trained(tmp_path: Path) -> None:
    model = smp.DistributedModel(functional)
    prediction_of(model)
    model.save_model(tmp_path / "saved")
    loaded = tf_keras.models.load_model(tmp_path / "saved")
    assert [type(layer).__name__ for layer in loaded.layers] == ["InputLayer", "Dense", "Dense", "Concatenate"]
    loaded.compile("sgd", "mse")
    before = loaded.get_weights()[0]
    loaded.fit(X, np.ones([4, 6], np.float32), epochs=1, verbose=0)
    assert not np.array_equal(loaded.get_weights()[0], before)


def test_the_values_are_in_the_folder_and_nothing_else_is_left(tmp_path: Path) -> None:
    model = Net()
    train(model)
    model.save_model(tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    files = sorted(path.name for path in (tmp_path / "saved" / "variables").iterdir())
    assert files[-1] == "variables.index"
    assert not any("-part-" in name for name in files)
    stored = tf.train.list_variables(str(tmp_path / "saved" / "variables" / "variables"))
    assert sorted(shape for name, shape in stored if "_CHECKPOINTABLE" not in name) == sorted(
        v.shape.as_list() for v in model.variables
    )


@pytest.mark.parametrize("name", ["net.keras", "net.h5", "net.hdf5"])
@pytest.mark.parametrize("form", ["functional", "functional builder", "sequential builder"])
def test_a_wrapped_model_is_written_to_one_file_like_any_of_keras(form: str, name: str, tmp_path: Path) -> None:
    model = FORMS[form]()
    train(model)
    model.save_model(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    loaded = tf_keras.models.load_model(tmp_path / name, compile=False)
    assert loaded(X).numpy() == pytest.approx(prediction_of(model), abs=1e-6)


def test_saving_again_replaces_the_earlier_model(tmp_path: Path) -> None:
    model = smp.DistributedModel(functional)
    prediction_of(model)
    model.save_model(tmp_path / "saved")
    (tmp_path / "saved" / "not_of_the_model").touch()
    train(model)
    model.save_model(str(tmp_path / "saved"))
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert (tmp_path / "saved" / "not_of_the_model").exists()
    assert not list((tmp_path / "saved").glob(".*"))
    loaded = tf_keras.models.load_model(tmp_path / "saved")
    assert loaded(X).numpy() == pytest.approx(prediction_of(model), abs=1e-6)


@pytest.mark.parametrize("name", ["saved", "net.h5", "net.keras", "net.weights.h5"])
def test_what_cannot_be_replaced_is_refused_before_anything_is_computed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = smp.DistributedModel(functional)
    prediction_of(model)
    (tmp_path / name).touch() if name == "saved" else (tmp_path / name).mkdir()
    monkeypatch.setattr(saving, "write_with_all_weights", pytest.fail)
    with pytest.raises(StepError, match=rf"'.*/{name}' is (none|one)\. "):
        model.save_model(tmp_path / name)


def test_an_error_while_saving_leaves_the_earlier_model_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = smp.DistributedModel(functional)
    before = prediction_of(model)
    model.save_model(tmp_path / "saved")
    train(model)

    write = tf_keras.models.save_model

    def full(*args: Any, **kwargs: Any) -> None:
        write(*args, **kwargs)
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(tf_keras.models, "save_model", full)
        with pytest.raises(OSError, match="No space left on device"):
            model.save_model(tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert tf_keras.models.load_model(tmp_path / "saved")(X).numpy() == pytest.approx(before, abs=1e-6)
    with pytest.raises(StepError, match="called outside a step"):
        model(X)


def test_an_error_while_a_saved_model_takes_its_place_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = smp.DistributedModel(sequential)
    before = prediction_of(model)
    model.save_model(tmp_path / "saved")
    train(model)
    monkeypatch.setattr(durable_files, "_exchange", lambda first, second: False)
    rename = os.rename

    def failing(source: str, target: str) -> None:
        if ".writing-" in source:
            raise OSError(5, "Input/output error")
        rename(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", failing)
        with pytest.raises(OSError, match="Input/output error"):
            model.save_model(tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert tf_keras.models.load_model(tmp_path / "saved")(X).numpy() == pytest.approx(before, abs=1e-6)


def test_weights_of_other_types_and_shapes_keep_their_bits(tmp_path: Path) -> None:
    class Odd(smp.DistributedModel):
        def __init__(self) -> None:
            super().__init__()
            self.dense = layers.Dense(3, kernel_initializer="identity")
            self.half = self.add_weight("half", (2, 0), dtype=tf.float16)
            self.scalar = self.add_weight("scalar", (), dtype=tf.int64, initializer="ones", trainable=False)
            self.brain = self.add_weight("brain", (3,), dtype=tf.bfloat16, initializer="ones")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.dense(x) + tf.cast(self.brain, tf.float32) * tf.cast(self.scalar, tf.float32)

    model = Odd()

    @smp.step
    def step(x: tf.Tensor) -> tf.Tensor:
        return model(x)

    step(X)
    model.brain.assign(tf.constant([1.5, -2.0, 0.25], tf.bfloat16))
    model.save_model(tmp_path / "saved")
    loaded = tf_keras.models.load_model(tmp_path / "saved")
    found = {v.name: v for v in loaded.variables}
    assert (found["half:0"].dtype, found["half:0"].shape) == (tf.float16, (2, 0))
    assert (found["scalar:0"].dtype, int(found["scalar:0"])) == (tf.int64, 1)
    assert found["brain:0"].dtype == tf.bfloat16
    assert [float(v) for v in found["brain:0"].numpy()] == [1.5, -2.0, 0.25]


@pytest.mark.parametrize(
    "variable", [tf.Variable([1.5, 2.5]), tf.Variable(3, dtype=tf.int64), tf.Variable(tf.zeros([2, 0]))]
)
def test_bytes_sent_become_the_value_again(variable: tf.Variable) -> None:
    sent = fetch.as_bytes(variable)
    assert sent.dtype == np.uint8
    again = fetch.as_tensor(memoryview(sent.tobytes()), variable)
    assert (again.dtype, again.shape) == (variable.dtype, variable.shape)
    assert again.numpy().tolist() == variable.numpy().tolist()


class _PeerInAStep:
    """A transport of rank 0 in a world of two, whose rank 1 waits in a step for a message from rank 0."""

    rank = 0

    def __init__(self) -> None:
        self.sent: list[int] = []

    def send_bytes(self, dest: int, tag: int, data: bytes, timeout: float | None = None, label: str = "") -> None:
        self.sent.append(dest)

    def recv_bytes(
        self,
        src: int,
        tag: int,
        timeout: float | None = None,
        while_waiting: Callable[[], None] | None = None,
        label: str = "",
    ) -> memoryview:
        assert while_waiting is not None, "nobody would ever end this"
        for _ in range(3):
            while_waiting()
        raise TimeoutError

    def ask(self, rank: int, timeout: float = 1.0) -> dict[str, Any]:
        wait = {"peer": 0, "is_send": False, "label": "x:0", "program": 3, "step": 7, "microbatch": 0, "seconds": 6.0}
        if rank == 0:
            return {"rank": 0, "in_step": False, "program": 3, "step": 6, "waits": []}
        return {"rank": 1, "in_step": True, "program": 3, "step": 7, "waits": [wait]}

    def set_activity(self, text: str) -> None:
        pass


@pytest.fixture
def with_a_peer_in_a_step(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], _PeerInAStep]]:
    """Makes this rank, from the call on, rank 0 of two."""
    impatient = functools.partial(DeadlockWatch, patience=0.0, interval=0.0)
    monkeypatch.setattr(control_channel, "DeadlockWatch", impatient)
    alone, transport = runtime.current(), _PeerInAStep()
    topology = dataclasses.replace(
        alone.topology, mesh=Mesh(2, 2), local_size=2, hosts=alone.topology.hosts * 2, pids=(100, 101)
    )
    channel: Any = ControlChannel(0, transport, 60.0)  # type: ignore[arg-type]

    def pretend() -> _PeerInAStep:
        runtime.install(dataclasses.replace(alone, topology=topology, control=channel, transport=transport))  # type: ignore[arg-type]
        return transport

    yield pretend
    runtime.install(alone)


def test_a_rank_that_saves_alone_while_another_waits_for_it_in_a_step_is_an_error_and_no_hang(
    with_a_peer_in_a_step: Callable[[], _PeerInAStep], tmp_path: Path
) -> None:
    model = Net()
    train(model)
    peer = with_a_peer_in_a_step()
    with pytest.raises(RankMismatchError) as raised:
        model.save_model(tmp_path / "saved")
    assert str(raised.value) == (
        "Rank 0 is at the beginning of saving model 'net', while rank 1 is in step 7 and waits for 'x:0' from rank 0. "
        "Every rank must call the same steps in the same order, and the ranks of a replica with batches of the "
        "same shapes."
    )
    assert list(tmp_path.iterdir()) == []
    assert peer.sent == []


WRITERS: dict[str, Callable[[Any, str], Any]] = {
    "export": lambda model, place: model.export(place),
    "a SavedModel of TensorFlow's": tf.saved_model.save,
    "a SavedModel of Keras's": tf_keras.models.save_model,
    "a file of Keras's": lambda model, place: tf_keras.models.save_model(model, f"{place}.keras"),
    "a pickle": lambda model, place: pickle.dumps(model),
    "a copy": lambda model, place: copy.deepcopy(model),
}


class TestRefused:
    @pytest.mark.parametrize("name", ["net.keras", "net.h5", "net.hdf5"])
    def test_a_file_that_could_not_be_loaded_without_the_class(self, name: str, tmp_path: Path) -> None:
        model = Net()
        train(model)
        with pytest.raises(StepError, match=r"^A subclass of smp.DistributedModel cannot be written as a \.") as raised:
            model.save_model(tmp_path / name)
        assert f"path='{tmp_path / name}'. Leave out the extension to write a SavedModel" in str(raised.value)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("form", ["subclass", "functional builder"])
    @pytest.mark.parametrize("writer", WRITERS)
    def test_what_writes_without_the_other_ranks(self, form: str, writer: str, tmp_path: Path) -> None:
        model, place = FORMS[form](), str(tmp_path / "saved")
        prediction_of(model)
        with pytest.raises(StepError, match="cannot write model 'net', whose weights are on several ranks") as raised:
            WRITERS[writer](model, place)
        assert str(raised.value).startswith(("model.export", "tf.saved_model.save", "tf.keras.models.save_model"))
        assert not (tmp_path / "saved" / "saved_model.pb").exists()

    def test_a_model_that_has_not_run_a_step(self, tmp_path: Path) -> None:
        """What is saved before a step is in test_before_steps.py."""
        model = Net()
        model.build((None, 3))
        with pytest.raises(StepError, match=r"Model 'net' has not been called yet, .* the model on tf_keras.Input"):
            model.save_model(tmp_path / "saved")
        assert list(tmp_path.iterdir()) == []
        model(tf_keras.Input((3,)))
        model.save_model(tmp_path / "saved")
        loaded = tf_keras.models.load_model(tmp_path / "saved")
        assert all(map(np.array_equal, loaded.get_weights(), model.get_weights()))

    def test_a_model_that_was_not_even_built(self, tmp_path: Path) -> None:
        with pytest.raises(StepError, match=r"and has not run a step yet, so there is nothing to save\. Run a step"):
            Net().save_model(tmp_path / "saved")
        assert list(tmp_path.iterdir()) == []
