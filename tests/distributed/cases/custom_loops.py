"""Loops of a script's own in all their variety; each says numbers that must not depend on the number of partitions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp

ROWS = 12


def features(samples: int = ROWS, shift: float = 0.0) -> np.ndarray:
    return np.sin(np.arange(samples * 4, dtype=np.float64).reshape(samples, 4) + shift)


class Net(smp.DistributedModel):
    """Dense layers in float64, with another way into them."""

    def __init__(self, width: int, depth: int = 1, name: str = "net") -> None:
        super().__init__(name=name)
        self.hidden = [layers.Dense(6, activation="tanh", dtype="float64") for _ in range(depth)]
        self.head = layers.Dense(width, dtype="float64")

    def encode(self, x: tf.Tensor) -> tf.Tensor:
        for layer in self.hidden:
            x = layer(x)
        return x

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.head(self.encode(x))


def owned(*models: smp.DistributedModel) -> dict[str, np.ndarray]:
    """What this rank stores, by model and position."""
    return {
        f"{model.name}[{number}]": variable.numpy()
        for model in models
        for number, variable in enumerate(model.variables)
        if any(variable is local for local in model.local_variables)
    }


def adversaries() -> dict[str, Any]:
    """Two models, and two steps that each train one of them: the second uses both."""
    maker, judge = Net(4, name="maker"), Net(1, name="judge")
    for_maker, for_judge = tf_keras.optimizers.SGD(0.1), tf_keras.optimizers.SGD(0.1)

    @smp.step
    def train_judge(real: tf.Tensor, fake: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((judge(real) - 1.0) ** 2) + tf.reduce_mean(judge(fake) ** 2)
        return loss, tape.gradient(loss, judge.trainable_variables)

    @smp.step
    def train_maker(noise: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            made = maker(noise)
            loss = tf.reduce_mean((judge(made) - 1.0) ** 2)
        return loss, tape.gradient(loss, maker.trainable_variables), made

    @tf.function
    def train(real: tf.Tensor, noise: tf.Tensor) -> Any:
        mine, gradients, made = train_maker(noise)
        sums = [g.accumulate() for g in gradients]
        for_maker.apply_gradients(zip(sums, maker.trainable_variables, strict=True))
        other, gradients = train_judge(real, made.merge())
        sums = [g.accumulate() for g in gradients]
        for_judge.apply_gradients(zip(sums, judge.trainable_variables, strict=True))
        return mine.reduce_mean(), other.reduce_mean()

    losses = [train(tf.constant(features(shift=n)), tf.constant(features(shift=-n))) for n in range(4)]
    return {"numbers": np.array(losses), "weights": owned(maker, judge)}


def script_variables(eager: bool) -> dict[str, Any]:
    """The script's own variables: a trainable one, and some that the step writes for each microbatch."""
    net = Net(4)
    scale = tf.Variable(np.full([4], 1.5), name="scale")
    seen = tf.Variable(0, dtype=tf.int64, trainable=False)
    average = tf.Variable(0.0, dtype=tf.float64, trainable=False)
    mean = tf_keras.metrics.Mean(dtype="float64")
    optimizer = tf_keras.optimizers.Adam(0.01)

    @smp.step
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((scale * net(x) - 1.0) ** 2)
        seen.assign_add(tf.shape(x, out_type=tf.int64)[0])
        average.assign(0.9 * average + 0.1 * loss)
        mean.update_state(loss)
        return loss, tape.gradient(loss, [*net.trainable_variables, scale])

    @smp.step
    def evaluate(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(scale * net(x), axis=1)

    def train(x: tf.Tensor) -> tf.Tensor:
        loss, gradients = step(x)
        sums = [g.accumulate() for g in gradients]
        optimizer.apply_gradients(zip(sums, [*net.trainable_variables, scale], strict=True))
        return loss.reduce_mean()

    run: Callable[..., Any] = train if eager else tf.function(train)
    losses = [float(run(tf.constant(features(shift=n)))) for n in range(3)]
    told = [*losses, *scale.numpy(), int(seen), float(average), float(mean.result())]
    return {"numbers": np.array([*told, *evaluate(features()).merge().numpy()]), "weights": owned(net)}


@dataclass(frozen=True)
class Batch:
    """Features, and a weight for each."""

    x: Any
    weight: Any
    name: str = "batch"


@dataclass(frozen=True)
class Found:
    loss: Any
    codes: Any


class Strided:
    """Cuts itself by strides."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> Batch:
        return Batch(self.batch.x[mb::num_mb], self.batch.weight[mb::num_mb])


def records_and_objects(eager: bool, strided: bool) -> dict[str, Any]:
    """A dataclass in, or an object that cuts itself; a dataclass out; and a method of the model beside its call."""
    net = Net(4)

    @smp.step
    def step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            codes = net.encode(batch.x)
            loss = tf.reduce_mean(batch.weight[:, None] * (net.head(codes) - 1.0) ** 2)
        return Found(loss, codes), tape.gradient(loss, net.trainable_variables)

    def train(x: Any, weight: Any) -> Any:
        batch = Batch(x, weight)
        found, gradients = step(Strided(batch) if strided else batch)
        squares = [tf.reduce_sum(found.codes.merge() ** 2), found.loss.reduce_mean()]
        return tf.stack([*squares, smp.global_norm([g.accumulate() for g in gradients])])

    run: Callable[..., Any] = train if eager else tf.function(train)
    weights = np.linspace(0.5, 1.5, ROWS)
    numbers = [run(tf.constant(features(shift=n)), tf.constant(weights)) for n in range(2)]
    return {"numbers": np.array(numbers), "weights": owned(net)}


def batches_of_all_sizes(eager: bool, signature: bool) -> dict[str, Any]:
    """Batches of many sizes, one of them smaller than the number of microbatches; arrays of NumPy, float32 cast."""
    net = Net(4)
    traced = []
    options = {"input_signature": [tf.TensorSpec([None, 4], tf.float64)]} if signature else {}

    @smp.step(**options)
    def step(x: tf.Tensor) -> Any:
        traced.append(x.shape[0])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((net(x) - 1.0) ** 2)
        return loss, tape.gradient(loss, net.trainable_variables)

    def norm(x: Any) -> tf.Tensor:
        loss, gradients = step(x)
        return tf.stack([loss.reduce_mean(), smp.global_norm([g.accumulate() for g in gradients])])

    run: Callable[..., Any] = norm if eager else tf.function(norm)
    sizes = (12, 3, 10, 12) if signature else (12, 8, 3, 10, 11, 12)
    numbers = [run(features(size) if eager else tf.constant(features(size))) for size in sizes]
    return {"numbers": np.array(numbers), "weights": owned(net), "traced": [size or 0 for size in traced]}


def two_models(depth: int = 3) -> dict[str, Any]:
    """Two models, each with a step of its own, and so with a plan of its own; fresh, as a new process makes them."""
    tf_keras.backend.clear_session()
    models = [Net(2, depth, name="one"), Net(1, 2, name="two")]
    numbers = []
    for model in models:

        @smp.step
        def train(x: tf.Tensor, model: Net = model) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - 1.0) ** 2)
            return loss, tape.gradient(loss, model.trainable_variables)

        loss, gradients = train(features())
        numbers += [loss.reduce_mean(), smp.global_norm([g.accumulate() for g in gradients])]
    stored = {model.name: len(model.local_variables) for model in models}
    return {"numbers": np.array(numbers), "stored": stored, "weights": owned(*models)}


def plan_file(config: dict[str, Any], path: str) -> dict[str, Any]:
    """Makes plans and keeps them, moves a layer in the file, and runs with that; then with files that do not fit."""
    file = Path(path)
    refused = {}

    def start(**changes: Any) -> None:
        smp.shutdown()
        smp.init({**config, "partition_file": path, **changes})

    def refusal(name: str, act: Callable[[], Any]) -> None:
        try:
            act()
        except (ValueError, RuntimeError) as error:
            refused[name] = f"{type(error).__name__}: {error}"

    refusal("missing", lambda: start(load_partition=True))
    start()
    made = two_models()
    smp.barrier()
    text = file.read_text()
    plans = json.loads(text)
    units = plans["plans"][0]["units"]
    smp.barrier()
    if smp.rank() == 0:
        first_of_last = next(name for name, partition in units.items() if partition == smp.mp_size() - 1)
        units[first_of_last] -= 1
        file.write_text(json.dumps(plans))
    start(load_partition=True)
    changed = two_models()
    refusal("another model", lambda: two_models(depth=4))
    if smp.rank() == 0:
        file.write_text(json.dumps({**plans, "partitions": 7}))
    refusal("partitions", lambda: start(load_partition=True))
    start(memory_limit="2KB")
    refusal("memory", two_models)
    start(partition_file=None)
    net = Net(2, name="net")

    @smp.step
    def predict(x: tf.Tensor) -> tf.Tensor:
        return net(x)

    before = predict(features()).merge().numpy()
    start(partition_file=None)
    after = predict(features()).merge().numpy()
    start(partition_file=None, partitions=1)
    refusal("cut anew", lambda: predict(features()))
    return {
        **made,
        "changed": changed,
        "plans": [(plan["step"], list(plan["units"].values())) for plan in json.loads(text)["plans"]],
        "refused": refused,
        "kept": [before, after],
    }


def local_outputs() -> dict[str, Any]:
    """Values that stay where they are made, and one that is sent to all."""
    net = Net(4, depth=3)

    @smp.step(local_outputs=["first", "last"])
    def step(x: tf.Tensor) -> Any:
        first = net.hidden[0](x)
        last = net.head(net.hidden[2](net.hidden[1](first)))
        return {"first": first, "last": last, "mean": tf.reduce_mean(last)}

    found = step(features())
    here, refused = {}, {}
    for name in ("first", "last"):
        if found[name].is_local:
            here[name] = found[name].merge()
        else:
            try:
                found[name].reduce_mean()
            except smp.errors.StepError as error:
                refused[name] = str(error)
    return {"numbers": found["mean"].reduce_mean(), "weights": here, "refused": refused}


def linear_head(eager: bool) -> dict[str, Any]:
    """Only the last layer trains, by a loss whose gradient needs nothing of that layer."""
    tf_keras.backend.set_floatx("float64")  # of a norm of no gradients
    net = Net(4)
    net.head = layers.Dense(4, use_bias=False, dtype="float64")
    optimizer = tf_keras.optimizers.SGD(0.1)

    @smp.step
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(net(x))
        return tape.gradient(loss, [net.head.kernel])

    def train(x: tf.Tensor) -> tf.Tensor:
        sums = [g.accumulate() for g in step(x)]
        optimizer.apply_gradients(zip(sums, [net.head.kernel], strict=True))
        return smp.global_norm(sums)

    run: Callable[..., Any] = train if eager else tf.function(train)
    norms = [run(tf.constant(features(shift=n))) for n in range(2)]
    return {"numbers": np.array(norms), "weights": owned(net)}


def sparse_microbatches() -> dict[str, Any]:
    """The gradient of a table for each microbatch, joined and stacked on the rank that has it."""
    net = smp.DistributedModel(
        lambda: tf_keras.Sequential(
            [layers.Embedding(9, 3, dtype="float64"), *(layers.Dense(3, dtype="float64") for _ in range(3))]
        )
    )

    @smp.step(keep_microbatch_gradients=True)
    def step(tokens: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(net(tokens) ** 2)
        return loss, tape.gradient(loss, net.trainable_variables[0])

    loss, gradient = step(tf.constant(np.arange(ROWS * 2).reshape(ROWS, 2) % 9))
    here = {}
    if gradient.is_local:
        joined, stacked = gradient.concat(), gradient.stack()
        assert isinstance(joined, tf.IndexedSlices)
        assert isinstance(stacked, tf.SparseTensor)
        here = {"joined": tf.convert_to_tensor(joined), "stacked": tf.sparse.to_dense(stacked)}
    return {"numbers": loss.reduce_mean(), "weights": here}
