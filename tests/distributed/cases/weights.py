"""Writes and reads weights of a split model in every way, and says what each rank read and what came of it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.errors import OwnershipError, RankMismatchError, StepError
from smp_tf.variables.store import is_remote

X = np.arange(24, dtype=np.float32).reshape(8, 3) / 10.0
SUBCLASS_FILES = ["w.weights.h5", "w.h5", "w"]
FUNCTIONAL_FILES = [*SUBCLASS_FILES, "m.keras", "m.h5"]


def net_of(base: Any) -> Any:
    class Net(base):
        def __init__(self) -> None:
            super().__init__(name="net")
            # Keras numbers layers without a name per process, and rank 0 builds a model more than the others.
            self.hidden = layers.Dense(4, activation="tanh", name="hidden")
            self.normal = layers.BatchNormalization(name="normal")
            self.middle = layers.Dense(5, activation="tanh", name="middle")
            self.head = layers.Dense(2, name="head")

        def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
            return self.head(self.middle(self.normal(self.hidden(x), training=training)))

    return Net()


def functional() -> tf_keras.Model:
    inputs = layers.Input((3,))
    hidden = layers.Dense(4, activation="tanh", name="hidden")(inputs)
    middle = layers.Dense(5, activation="tanh", name="middle")(layers.BatchNormalization(name="normal")(hidden))
    return tf_keras.Model(inputs, layers.Dense(2, name="head")(middle), name="fun")


KINDS: dict[str, tuple[Callable[[], Any], Callable[[], Any], list[str]]] = {
    "subclass": (lambda: net_of(smp.DistributedModel), lambda: net_of(tf_keras.Model), SUBCLASS_FILES),
    "builder": (lambda: smp.DistributedModel(functional), functional, FUNCTIONAL_FILES),
}


def predictor(model: Any) -> Callable[[], np.ndarray]:
    """What asks for a model's predictions, by one step that is traced once."""

    @smp.step
    def predict(x: tf.Tensor) -> tf.Tensor:
        return model(x, training=False)

    return lambda: predict(X).concat().numpy()


@contextlib.contextmanager
def values_read() -> Iterator[list[str]]:
    """What is read of HDF5 files and of checkpoints within this context."""
    read: list[str] = []
    of_hdf5, load = h5py.Dataset.__array__, tf.train.load_checkpoint

    def counted(dataset: h5py.Dataset, *args: Any, **kwargs: Any) -> Any:
        read.append(dataset.name)
        return of_hdf5(dataset, *args, **kwargs)

    class Reader:
        def __init__(self, reader: Any) -> None:
            self._reader = reader

        def __getattr__(self, name: str) -> Any:
            return getattr(self._reader, name)

        def get_tensor(self, key: str) -> Any:
            if "OBJECT_GRAPH" not in key:
                read.append(key)
            return self._reader.get_tensor(key)

    h5py.Dataset.__array__, tf.train.load_checkpoint = counted, lambda path: Reader(load(path))
    try:
        yield read
    finally:
        h5py.Dataset.__array__, tf.train.load_checkpoint = of_hdf5, load


def files(kind: str) -> dict[str, Any]:
    """Ours into plain Keras, and plain Keras's into ours, before the first step and after it.

    Args:
        kind: of model, in KINDS.
    """
    distributed, plain, names = KINDS[kind]
    folder = Path(tempfile.mkdtemp()) if smp.rank() == 0 else None
    folder = smp.allgather(folder)[0]
    model = distributed()
    ours = predictor(model)()
    found: dict[str, Any] = {"ours": ours, "plain": {}, "before": {}, "after": {}, "read": {}}
    for name in names:
        if name.startswith("w"):
            model.save_weights(folder / name)
        else:
            model.save_model(folder / name)
        if smp.rank() == 0:
            target = plain()
            target(X)
            if name == "m.h5":
                target = tf_keras.models.load_model(folder / name, compile=False)
            else:
                target.load_weights(folder / name)
            found["plain"][name] = target(X).numpy()
            if name == "m.h5":
                continue
            target.set_weights([w + 0.25 for w in target.get_weights()])
            target.save(folder / name) if name == "m.keras" else target.save_weights(folder / name)
            found["changed"] = target(X).numpy()
    smp.barrier()
    late = distributed()
    predict_late = predictor(late)
    predict_late()
    for name in names:
        if name == "m.h5":
            continue
        early = distributed()
        with values_read() as read:
            early.load_weights(folder / name)
            found["before"][name] = predictor(early)()
        late.set_weights([np.full(shard.shape, 0.5, np.float32) for shard in late.get_weights().shards])
        found["filled"] = predict_late()
        with values_read() as read_late:
            late.load_weights(folder / name)
        found["after"][name] = predict_late()
        found["read"][name] = [len(read), len(read_late), len(late.local_variables), len(late.variables)]
    return found


def lists() -> dict[str, Any]:
    """Lists of weights: taken and put back, moved to a model cut otherwise, gathered, set whole, and refused."""
    model = KINDS["builder"][0]()
    predict = predictor(model)
    before = predict()
    kept = model.get_weights()
    here = sorted(kept.local)
    model.set_weights([np.zeros(shard.shape, np.float32) for shard in kept.shards])
    zeros = predict()
    model.set_weights(kept)
    back = predict()
    gathered = list(kept)
    last = kept[-1]
    whole = KINDS["builder"][0]()
    whole.set_weights(gathered)
    refused = []
    for weights in (gathered[:-1], [*gathered[:-1], np.zeros(9)]):
        try:
            model.set_weights(weights)
        except ValueError as error:
            refused.append(str(error))
    return {
        "before": before, "zeros": zeros, "back": back, "whole": predictor(whole)(), "last": last, "here": here,
        "gathered": gathered, "said": repr(kept), "refused": refused,
    }  # fmt: skip


class Placed(smp.DistributedModel):
    """A model that is cut where it is told to be.

    Args:
        first: number of layers on stage 0.
    """

    def __init__(self, first: int) -> None:
        super().__init__(name="placed")
        self.layers_in_order = [layers.Dense(4, name=f"layer{number}") for number in range(4)]
        self.first = first

    def call(self, x: tf.Tensor) -> tf.Tensor:
        for number, layer in enumerate(self.layers_in_order):
            with smp.partition(0 if number < self.first else 1):
                x = layer(x)
        return x


def moved() -> dict[str, Any]:
    """The weights of a model cut after its first layer, given to one that is cut after its third."""
    source, target = Placed(1), Placed(3)
    predict = predictor(target)
    wanted = predictor(source)()
    before = predict()
    target.set_weights(source.get_weights())
    owners = [[shard.layout.stage for shard in model.get_weights().shards] for model in (source, target)]
    return {"wanted": wanted, "before": before, "after": predict(), "owners": owners}


def failing() -> dict[str, Any]:
    """Rank 0 cannot write: every rank gets an error, and can go on."""
    model = KINDS["builder"][0]()
    predict = predictor(model)
    before = predict()
    folder = Path(tempfile.mkdtemp())

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("No space left on device")

    original, tf_keras.Model.save_weights = tf_keras.Model.save_weights, full
    said = ""
    try:
        model.save_weights(folder / "w.h5")
    except (StepError, OSError) as error:
        said = f"{type(error).__name__}: {error}"
    finally:
        tf_keras.Model.save_weights = original
    foreign = next((v for v in model.variables if all(v is not w for w in model.local_variables)), None)
    try:
        if foreign is not None:
            foreign.numpy()
        refused = foreign is None
    except OwnershipError:
        refused = True
    same = bool((predict() == before).all())
    return {"said": said, "left": [path.name for path in folder.iterdir()], "refused": refused, "same": same}


def pretrained() -> dict[str, Any]:
    """Two pre-trained models of the same names, loaded where a distributed model is made, in every format.

    Each rank makes them, which takes no more than knowing what they give; rank 0 writes them.
    """
    folder = smp.allgather(Path(tempfile.mkdtemp()) if smp.rank() == 0 else None)[0]
    sources = [functional(), functional()]
    for number, source in enumerate(sources):
        drawn = np.random.default_rng(number)
        source.set_weights([drawn.uniform(0.1, 1.0, w.shape) for w in source.get_weights()])
    found: dict[str, Any] = {"wanted": sources[0](X).numpy() + sources[1](X).numpy(), "given": {}, "read": {}}

    class Pair(smp.DistributedModel):
        def __init__(self, paths: list[str]) -> None:
            super().__init__(name="pair")
            self.one, self.other = (tf_keras.models.load_model(path, compile=False) for path in paths)

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.one(x, training=False) + self.other(x, training=False)

    for end in (".keras", ".h5", ""):
        paths = [str(folder / f"{number}{end}") for number in range(2)]
        if smp.rank() == 0:
            for source, path in zip(sources, paths, strict=True):
                source.save(path)
        smp.barrier()
        with values_read() as read:
            model = Pair(paths)
            before = len(read)

            @smp.step
            def predict(x: tf.Tensor, model: Any = model) -> tf.Tensor:
                return model(x)

            found["given"][end] = predict(X).concat().numpy()
        found["read"][end] = [before, len(read), len(model.local_variables), len(model.variables)]
    return found


def heads_of(base: Any) -> Any:
    """A model of which a training with a loss for one output leaves two layers out."""

    class Heads(base):
        def __init__(self) -> None:
            super().__init__(name="heads")
            # Made before the layers that it needs, it is kept where they cannot reach it.
            self.early = layers.Dense(2, name="early")
            self.early.build((None, 4))
            self.hidden = layers.Dense(4, activation="tanh", name="hidden")
            self.middle = layers.Dense(4, activation="tanh", name="middle")
            self.main = layers.Dense(2, name="main")
            self.late = layers.Dense(1, name="late")

        def call(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
            found = self.middle(self.hidden(x))
            main = self.main(found)
            return {"main": main, "early": self.early(found), "late": self.late(main)}

    model = Heads()
    model.build((None, 3))
    drawn = np.random.default_rng(7)
    model.set_weights([drawn.normal(size=v.shape).astype(np.float32) for v in model.weights])
    model.compile(tf_keras.optimizers.Adam(0.01), loss={"main": "mse"})
    return model


def unused() -> dict[str, Any]:
    """Layers that the training does not use are saved and restored meanwhile, and predict as in plain Keras."""
    folder = Path(smp.allgather(tempfile.mkdtemp() if smp.rank() == 0 else None)[0])
    y = {"main": X[:, :2] * 0.5, "early": X[:, 1:]}

    def trained(base: Any) -> Any:
        model = heads_of(base)
        model.fit(X, {"main": y["main"]}, batch_size=8, epochs=2, verbose=0)
        return model

    def trained_more(model: Any) -> list[np.ndarray]:
        model.compile(model.optimizer, loss={"main": "mse", "early": "mse"})
        model.fit(X, y, batch_size=8, epochs=2, verbose=0)
        return list(model.get_weights())

    def stages() -> list[tuple[str, int, bool]]:
        states = {layer.name: model._smp_store.state(layer.kernel) for layer in model.layers}
        return [(name, state.owner, state.is_decided) for name, state in states.items()]

    model = trained(smp.DistributedModel)
    found: dict[str, Any] = {"before": stages(), "weights": list(model.get_weights())}
    smp.CheckpointManager(tf.train.Checkpoint(model=model), folder).save()
    model.save_weights(folder / "w.h5")
    found["predicted"] = model.predict(X, verbose=0)
    found["after"] = stages()
    found["more"] = trained_more(model)
    other = trained(smp.DistributedModel)
    other.set_weights([np.zeros(v.shape, np.float32) for v in other.weights])
    smp.CheckpointManager(tf.train.Checkpoint(model=other), folder).restore()
    found["restored"] = other.predict(X, verbose=0)
    if smp.rank() == 0:
        plain = trained(tf_keras.Model)
        found["plain"] = plain.predict(X, verbose=0), plain.get_weights(), trained_more(plain)
        read = heads_of(tf_keras.Model)
        read.load_weights(folder / "w.h5")
        found["read"] = read.predict(X, verbose=0)
    return found


def used_by_all() -> dict[str, Any]:
    """What scripts of Keras's set and read of a model, on every rank; and what only one rank sets."""
    K = tf_keras.backend  # noqa: N806
    y = X[:, :2] * 0.5

    def said_by(doing: Callable[[], Any]) -> str:
        try:
            doing()
        except (OwnershipError, RankMismatchError) as error:
            return str(error)
        return ""

    class Changing(tf_keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            inner = getattr(self.model, "inner", self.model)
            for name in ("hidden", "head"):
                layer = inner.get_layer(name)
                layer.set_weights([0.9 * w for w in layer.get_weights()])
                K.set_value(layer.bias, K.get_value(layer.bias) + 0.25 * epoch)
                layer.kernel.assign_add(np.full(layer.kernel.shape, 0.125, np.float32))
                layer.kernel.assign_sub(np.full(layer.kernel.shape, 0.0625, np.float32))
                layer.bias.scatter_nd_update([[0]], [0.5])
            kernels = [inner.get_layer(name).kernel for name in ("hidden", "head")]
            K.batch_set_value([(v, 0.5 * w) for v, w in zip(kernels, K.batch_get_value(kernels), strict=True)])

    def trained(model: Any) -> Any:
        model.compile(tf_keras.optimizers.SGD(0.1), loss="mse")
        model.fit(X, y, batch_size=8, epochs=1, verbose=0)
        model.fit(X, y, batch_size=8, initial_epoch=1, epochs=3, verbose=0, callbacks=[Changing()])
        return model

    inner = functional()
    drawn = np.random.default_rng(5)
    start = [drawn.uniform(0.1, 1.0, v.shape) for v in inner.weights]
    inner.set_weights(start)
    model = smp.DistributedModel(inner)
    object.__setattr__(model, "inner", inner)
    trained(model)
    found: dict[str, Any] = {
        "weights": list(model.get_weights()),
        "by layer": [w for layer in inner.layers for w in layer.get_weights()],
        "by plain model": inner.get_weights(),
        "one": [K.get_value(v) for v in inner.weights],
    }
    foreign = next(v for v in inner.trainable_weights if is_remote(v))
    found["read"] = said_by(foreign.numpy)
    found["graph"] = said_by(lambda: tf.function(lambda: foreign.assign(tf.zeros(foreign.shape)))())
    part = tf_keras.Model(inner.input, inner.get_layer("middle").output)
    found["called"] = said_by(lambda: part(X))
    found["part"] = smp.DistributedModel(part).predict(X, verbose=0)
    # Each rank changes what it stores, and nobody minds.
    for variable in model.local_trainable_variables:
        variable.assign_add(tf.zeros(variable.shape))
    folder = Path(smp.allgather(tempfile.mkdtemp() if smp.rank() == 0 else None)[0])
    model.save_weights(folder / "w.h5")
    if smp.rank() == 0:
        foreign.assign(tf.zeros(foreign.shape))
    found["alone"] = said_by(lambda: model.save_weights(folder / "w.h5"))
    if smp.rank() == 0:
        foreign.assign(tf.zeros(foreign.shape))
    manager = smp.CheckpointManager(tf.train.Checkpoint(model=model), folder / "checkpoints")
    found["alone, checkpoint"] = said_by(manager.save)
    inner.get_layer("head").bias.assign([float(smp.rank()), 0.0])
    found["other"] = said_by(lambda: model.save_weights(folder / "w.h5"))
    if smp.rank() == 0:
        plain = functional()
        plain.set_weights(start)
        found["plain"] = trained(plain).get_weights()
        found["plain part"] = tf_keras.Model(plain.input, plain.get_layer("middle").output)(X).numpy()
    return found
