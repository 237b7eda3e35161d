"""Trains a model on this replica's part of every batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import tensorflow as tf

import smp_tf as smp
from smp_tf.job import runtime
from smp_tf.replicas import equal_start
from smp_tf.replicas import sums as data_parallel
from tests.distributed.cases.equality import make_model, own_variables
from tests.distributed.cases.training import training_step
from tests.distributed.models import MODELS, STEPS
from tests.ways import HandedTensors, followed

#: Samples of every replica in each step, out of the 16 of a batch of the zoo, by the number of replicas. With two
#: microbatches: sizes that they divide and others, one that only one replica has had before, and a batch of one sample.
#: Each size of a replica's own is traced.
SHARES = {
    1: [(16,), (15,), (6,), (16,)],
    2: [(10, 6), (10, 5), (1, 5), (10, 6)],
    3: [(6, 4, 6), (6, 4, 5), (1, 2, 3), (6, 4, 6)],
    4: [(4, 4, 4, 4), (4, 4, 4, 3), (1, 2, 2, 1), (4, 4, 4, 4)],
}


def train(model: str) -> dict[str, Any]:
    """Six optimizer steps; each of D replicas takes every D-th sample.

    Args:
        model: its name in the zoo.
    """
    return _trained(model, lambda arrays, step: [array[smp.dp_rank() :: smp.dp_size()] for array in arrays])


def train_on_shares(model: str, eager: bool) -> dict[str, Any]:
    """The same on shares of different sizes, which change; one process has those of all replicas.

    Args:
        model: its name in the zoo.
        eager: call the step outside a tf.function.
    """

    def part(arrays: Any, step: int) -> Any:
        sizes = SHARES[smp.dp_size()][step]
        begin = sum(sizes[: smp.dp_rank()])
        return [array[begin : begin + sizes[smp.dp_rank()]] for array in arrays]

    return _trained(model, part, eager, one_evaluates=True, steps=len(SHARES[1]))


def _trained(
    model: str,
    part: Callable[[Any, int], Any],
    eager: bool = False,
    one_evaluates: bool = False,
    steps: int = STEPS,
) -> dict[str, Any]:
    entry = MODELS[model]
    entry.prepare()
    net = make_model(entry)
    optimizer = entry.optimizer()
    step = training_step(entry, net, optimizer)
    train_step = step if eager else tf.function(step)
    losses = []
    for number in range(steps):
        batch = [tf.constant(array) for array in part(entry.batch(number), number)]
        losses.append((float(train_step(*batch)), int(batch[0].shape[0])))

    @smp.step
    def evaluate(batch: Any) -> tf.Tensor:
        # Gradients that the step keeps for itself are averaged with nobody.
        with tf.GradientTape() as tape:
            loss = entry.loss(net, batch)
        return loss + 0.0 * tf.linalg.global_norm(tape.gradient(loss, net.trainable_variables[:1]))

    # The first call is planned by all; another one concerns no other replica.
    for _ in range(1 + (smp.dp_rank() == smp.dp_size() - 1) if one_evaluates else 0):
        evaluate(tuple(tf.constant(array[:12]) for array in entry.batch(0)))
    transport = runtime.current().transport
    status = transport.ask(transport.rank) if transport is not None else None
    averages = status["averages"] if status is not None else None
    return {
        "variables": own_variables(net),
        "losses": losses,
        "replica": smp.dp_rank(),
        "stage": smp.mp_rank(),
        "averages": averages,
    }


def places() -> dict[str, Any]:
    """Where this rank is, its groups, and what its neighbours in them say over the wire."""
    return {
        "place": [smp.mp_rank(), smp.dp_rank()],
        "sizes": [smp.mp_size(), smp.dp_size(), smp.pp_size(), smp.tp_size(), smp.rdp_size()],
        "groups": [smp.get_mp_group(), smp.get_dp_group()],
        "heard": [smp.allgather(smp.rank(), smp.MP_GROUP), smp.allgather(smp.rank(), smp.DP_GROUP)],
    }


def shuffled_shares() -> dict[str, Any]:
    """Two epochs of this replica's share of a data set that is shuffled without a seed of its own."""
    dataset = tf.data.Dataset.range(20).shuffle(20).batch(6)
    share = smp.shard_dataset(dataset)
    return {"replica": smp.dp_rank(), "epochs": [[batch.numpy() for batch in share] for _ in range(2)]}


def own_gradients() -> dict[str, Any]:
    """Gradients that no step has made, other ones on every replica, applied eagerly and in a function."""
    optimizer = smp.DistributedOptimizer(tf.keras.optimizers.SGD(1.0))
    variable = tf.Variable([0.0, 10.0])
    gradient = tf.constant([1.0, 2.0]) * (smp.dp_rank() + 1)
    optimizer.apply_gradients([(gradient, variable)])
    tf.function(lambda: optimizer.apply_gradients([(gradient, variable)]))()
    return {"variable": variable.numpy()}


def gradients_of_the_mean(model: Any) -> Any:
    """A step that returns the gradients of the mean of the model's outputs."""

    @smp.step
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x))
        return tape.gradient(loss, model.trainable_variables)

    return step


def way_of_a_gradient() -> dict[str, Any]:
    """The files that a gradient is given to, from the graph of the step to the weight; None where another rank has it.

    It is followed while a training step is traced.
    """
    layers = [tf.keras.layers.Dense(units, use_bias=False, name=name) for name, units in (("first", 3), ("last", 1))]
    model = smp.DistributedModel(lambda: tf.keras.Sequential(layers))
    optimizer, handed = tf.keras.optimizers.SGD(0.1), HandedTensors()
    way: list[list[str] | None] = []

    step = gradients_of_the_mean(model)

    @tf.function
    def train(x: Any) -> None:
        def apply() -> Any:
            averages = [gradient.accumulate() for gradient in step(x)]
            optimizer.apply_gradients(zip(averages, model.trainable_variables, strict=True))
            return averages

        first, _ = handed.during(apply)
        way.append(None if first is None else handed.files_with(followed(first)))

    train(tf.ones([4, 2]))
    return {"way": way[-1]}


def called_twice() -> dict[str, Any]:
    """A step that one function calls twice, under names of its own, and in a loop: the sums of its gradients."""
    model = smp.DistributedModel(lambda: tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False)]))

    step = gradients_of_the_mean(model)

    @tf.function
    def both(x: Any) -> Any:
        with tf.name_scope("first"):
            [one] = step(x)
        with tf.name_scope("second"):
            [two] = step(3 * x)
        total = one.accumulate() + two.accumulate()
        for _ in tf.range(3):
            [more] = step(x)
            total += more.accumulate()
        return total

    x = tf.ones([4, 2]) * (smp.dp_rank() + 1)
    return {"sums": [both(x).numpy().ravel().tolist() for _ in range(20)]}


def few_and_many_slices(as_beside_a_gpu: bool = False) -> dict[str, Any]:
    """Sparse gradients of a table of three rows, of few tokens and of many, in a function and in a loop in it."""
    with mock.patch("smp_tf.replicas.sparse_sums.has_device", return_value=as_beside_a_gpu):
        return _few_and_many_slices()


def _few_and_many_slices() -> dict[str, Any]:
    model = smp.DistributedModel(lambda: tf.keras.Sequential([tf.keras.layers.Embedding(3, 2)]))

    @smp.step
    def step(tokens: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum(model(tokens), axis=1))
        return tape.gradient(loss, model.trainable_variables)

    @tf.function
    def once(tokens: Any) -> Any:
        found = step(tokens)[0].accumulate()
        return found.indices, tf.convert_to_tensor(found)

    @tf.function
    def in_a_loop(tokens: Any) -> Any:
        total = tf.zeros([3, 2])
        for _ in tf.range(5):
            total += tf.convert_to_tensor(step(tokens)[0].accumulate())
        return total

    few, many = ([[0], [1]], [[0]] * 4 + [[2]] * 4) if smp.dp_rank() == 0 else ([[1], [1]], [[2]] * 16)
    found = {}
    for name, tokens in (("few", few), ("many", many)):
        indices, total = once(tf.constant(tokens))
        looped = in_a_loop(tf.constant(tokens))
        found[name] = indices.numpy().tolist(), total.numpy()[:, 0].tolist(), looped.numpy()[:, 0].tolist()
    return found


def traced_once_more() -> dict[str, Any]:
    """Averages in a function within a function, of which one replica traces the outer one for two sizes of batches."""

    @tf.function
    def inner(gradient: tf.Tensor) -> tf.Tensor:
        return smp.average_gradients([gradient])[0]

    @tf.function
    def outer(x: tf.Tensor) -> list[tf.Tensor]:
        one = inner(tf.reduce_sum(x))
        [two] = smp.average_gradients([tf.reduce_sum(2.0 * x)])
        # TensorFlow would take the average of a constant for one.
        [three] = smp.average_gradients([tf.constant(3.0) * (smp.dp_rank() + 1)])
        return [one, two, three]

    sizes = [(4, 4), (4, 3), (4, 4)]
    return {"averages": [[float(t) for t in outer(tf.ones([own[smp.dp_rank()]]))] for own in sizes]}


def gradients(of: int = 0) -> dict[str, Any]:
    """The gradients of a float32 model on batches of this replica, from a step and from the script, as accumulated.

    Args:
        of: how many replicas one process has the batches of.
    """
    _, step = two_layers(16)
    parts = [tf.random.stateless_normal([8, 16], [1, replica]) for replica in range(of)]
    x = tf.concat(parts, 0) if parts else tf.random.stateless_normal([8, 16], [1, smp.dp_rank()])
    sums = [gradient.accumulate() for gradient in step(x)]
    [own] = [tf.add_n(parts) / of] if parts else smp.average_gradients([x])
    return {
        "gradients": {str(i): value.numpy() for i, value in enumerate(sums) if value is not None},
        "own": own.numpy(),
    }


def unequal_shapes() -> dict[str, Any]:
    """What is said of gradients, of the script's own, that have another shape on every replica."""
    # Known to Horovod by their names, from a time when they were alike.
    smp.average_gradients([tf.ones([8]), tf.fill([3], 100.0)])
    try:
        smp.average_gradients([tf.ones([8 + smp.dp_rank()]), tf.fill([3], 100.0)])
    except tf.errors.OpError as error:
        return {"said": error.message}
    return {"said": ""}


def two_layers(width: int = 4) -> tuple[Any, Any]:
    """A model, and a step that gives its gradients."""
    model = smp.DistributedModel(lambda: tf.keras.Sequential([tf.keras.layers.Dense(width) for _ in range(2)]))
    return model, gradients_of(model)


def gradients_of(model: Any) -> Any:
    """A step that gives the gradients of a model."""

    @smp.step
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    return step


def unlike_optimizers() -> dict[str, Any]:
    """What is said of optimizers whose arguments depend on the replica, and whether one has changed a weight."""
    model, step = two_layers()
    sums = [gradient.accumulate() for gradient in step(tf.ones([4, 4]) * (1.0 + smp.dp_rank()))]
    before = [v.numpy() for v in model.local_trainable_variables]
    kinds, more = tf.keras.optimizers, smp.dp_rank()
    made = {
        "rate": kinds.SGD(0.1 + 0.1 * more),
        "schedule": kinds.Adam(kinds.schedules.ExponentialDecay(0.1, 10 + more, 0.9)),
        "scaled": tf.keras.mixed_precision.LossScaleOptimizer(kinds.SGD(0.1, 0.5 + 0.1 * more), False, 1.0),
        "legacy": kinds.legacy.SGD(0.1 + 0.1 * more),
        "class": [kinds.SGD, kinds.Adam][more](0.1),
    }

    def said_of(optimizer: Any, in_a_function: bool) -> str:
        def apply() -> None:
            optimizer.apply_gradients(zip(sums, model.trainable_variables, strict=True))

        try:
            tf.function(apply)() if in_a_function else apply()
        except smp.errors.RankMismatchError as error:
            return str(error)
        return ""

    said = {name: said_of(optimizer, in_a_function=name != "rate") for name, optimizer in made.items()}
    now = [v.numpy() for v in model.local_trainable_variables]
    changed = any((one != other).any() for one, other in zip(before, now, strict=True))
    # Names are counted up, and whether 1 or 1.0 is given is one.
    fine = said_of(kinds.Adam(0.1, clipvalue=[1, 1.0][more], name=f"adam_{more}"), in_a_function=True)
    return {"said": said, "changed": changed, "fine": fine}


def loaded_by_one(root: int) -> dict[str, Any]:
    """What the replicas have of a model that the last of them has loaded something into, and what is said of it.

    Args:
        root: the replica whose values all are to take.
    """
    smp.callbacks.BroadcastInitialState(root).on_train_begin()

    def build() -> Any:
        return tf.keras.Sequential(
            [tf.keras.layers.Dense(4), tf.keras.layers.BatchNormalization(), tf.keras.layers.Dense(4)]
        )

    model = smp.DistributedModel(build)
    before: dict[str, Any] = {}

    def load() -> None:
        if smp.dp_rank() == smp.dp_size() - 1:
            for variable in model.local_variables:
                variable.assign(variable + 1.0)
        before.update({v.name: v.numpy() for v in model.local_variables})

    smp.register_post_partition_hook(load)
    with mock.patch.object(equal_start, "tell") as tell:
        gradients_of(model)(tf.ones([4, 4]))
    return {
        "before": before,
        "weights": {v.name: v.numpy() for v in model.local_variables},
        "said": [call.args[0] for call in tell.mock_calls],
        "place": [smp.mp_rank(), smp.dp_rank()],
    }


class Odd(tf.keras.layers.Layer):
    """A layer with state of types that Horovod does not send."""

    def build(self, shape: Any) -> None:
        """Make the state, with values of this replica's own."""
        own = smp.dp_rank()

        def state(name: str, dtype: str, value: Any, trainable: bool = False) -> Any:
            return self.add_weight(
                name, (2,), dtype=dtype, trainable=trainable, initializer=lambda *_, **__: tf.constant(value, dtype)
            )

        self.w = state("w", "complex64", [1 + 2j * (own + 1), 3 - 1j], trainable=True)
        self.states = [
            state("wide", "complex128", [1j * own, 2.0]),
            state("few", "uint32", [2**32 - 1 - own, 3]),
            state("many", "uint64", [2**63 + own, 3]),
            state("text", "string", [f"on replica {own}", "alike"]),
        ]

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """Use the state."""
        z = tf.cast(x, tf.complex64) * self.w
        first = [tf.cast(v[1], x.dtype) for v in self.states[:3]]
        return tf.math.real(z) + tf.math.imag(z) + tf.add_n(first) + float(len(self.states))


def odd_types() -> dict[str, Any]:
    """What replicas make of state and gradients of types that Horovod does not send."""
    model = smp.DistributedModel(lambda: tf.keras.Sequential([Odd()]))

    step = gradients_of_the_mean(model)

    [gradient] = step(tf.fill([4, 2], 1.0 + smp.dp_rank()))
    average = gradient.accumulate()
    tf.keras.optimizers.SGD(1.0).apply_gradients([(average, model.trainable_variables[0])])
    begun = {v.name: v.numpy() for v in model.local_variables if v.dtype != tf.string}
    # What one replica changes later.
    [text] = [v for v in model.local_variables if v.dtype == tf.string]
    texts = [_decoded(text)]
    text.assign(["longer on replica 1" if smp.dp_rank() else "short", ""])
    data_parallel.broadcast_over_replicas(model.local_variables, 1, "odd_types")
    return {"begun": begun, "average": average.numpy(), "texts": [*texts, _decoded(text)]}


def _decoded(text: Any) -> list[str]:
    return [one.decode() for one in text.numpy()]
