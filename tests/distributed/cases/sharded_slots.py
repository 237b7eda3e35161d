"""Trainings whose replicas share the optimizer's slots."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.keras.optimizer_slots import slots
from smp_tf.sharding import gather
from smp_tf.sharding.layouts import layout_of
from smp_tf.variables.store import is_remote
from tests.distributed.cases.sent_bytes import counted

ROWS = 12
#: What may differ between optimizers: slots of other shapes, or none; averages of weights; weights of two bytes.
OPTIMIZERS = {
    "adam": lambda: tf_keras.optimizers.Adam(0.01, weight_decay=0.1),
    "clipped": lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.05),
    "averages": lambda: tf_keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "finalized": lambda: tf_keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5),
    "adafactor": lambda: tf_keras.optimizers.Adafactor(0.1),
    "legacy": lambda: tf_keras.optimizers.legacy.Adam(0.01),
    "nadam": lambda: tf_keras.optimizers.Nadam(0.01),
}


class Net(smp.DistributedModel):
    """Layers of very different sizes."""

    def __init__(self, widths: tuple[int, ...] = (40, 3, 30, 7)) -> None:
        super().__init__(name="net")
        start = tf_keras.initializers.RandomNormal(seed=7)
        self.hidden = [layers.Dense(width, activation="tanh", kernel_initializer=start) for width in widths]
        self.head = layers.Dense(2, kernel_initializer=start)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        for layer in self.hidden:
            x = layer(x)
        return self.head(x)


def batch(step: int) -> np.ndarray:
    """This replica's part of a batch."""
    whole = np.random.RandomState(step).standard_normal((ROWS, 5)).astype(tf_keras.backend.floatx())
    return whole[smp.dp_rank() :: smp.dp_size()]


def trained(optimizer: str, eager: bool = False) -> dict[str, Any]:
    """Four steps of an optimizer over the model and a weight of the script's own.

    Args:
        optimizer: a key of `OPTIMIZERS`.
        eager: apply gradients outside a tf.function.
    """
    tf_keras.backend.set_floatx("float64")
    tf_keras.mixed_precision.set_global_policy("float64")
    net, scale, made = Net(), tf.Variable(2.0, dtype=tf.float64), OPTIMIZERS[optimizer]()

    @smp.step
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((scale * net(x) - 1.0) ** 2)
        return tape.gradient(loss, [*net.trainable_variables, scale]), loss

    def train(x: tf.Tensor) -> tf.Tensor:
        gradients, loss = step(x)
        sums = [gradient.accumulate() for gradient in gradients]
        made.apply_gradients(zip(sums, [*net.trainable_variables, scale], strict=True))
        return loss.reduce_mean()

    run = train if eager else tf.function(train)
    for number in range(4):
        run(tf.constant(batch(number)))
    if optimizer == "finalized":
        made.finalize_variable_values(net.trainable_variables)
    kept = {v.name: s.numpy().nbytes for v, _, s in slots(made, net.local_trainable_variables)}
    return {
        "weights": {v.name: v.numpy() for v in [*net.local_trainable_variables, scale]},
        "slots": kept,
        "sizes": {v.name: v.numpy().nbytes for v in net.local_trainable_variables},
        "iterations": int(made.iterations),
        "place": [smp.mp_rank(), smp.dp_rank()],
        "layouts": {v.name: str(layout_of(v)) for v in net.variables},
    }


def fitted() -> dict[str, Any]:
    """An epoch of `fit` in mixed precision with a loss scale, whose weights are float32."""
    tf_keras.mixed_precision.set_global_policy("mixed_float16")
    net = smp.DistributedModel(lambda: tf_keras.Sequential([layers.Dense(32, activation="tanh"), layers.Dense(1)]))
    net.compile(optimizer=tf_keras.optimizers.Adam(0.01, global_clipnorm=0.1), loss="mse")
    x = np.random.RandomState(0).standard_normal((48, 8)).astype(np.float32)
    y = x[:, :1] * 3.0 - x[:, 1:2]
    own = slice(smp.dp_rank(), None, smp.dp_size())
    history = net.fit(x[own], y[own], batch_size=8 // smp.dp_size(), epochs=2, shuffle=False, verbose=0)
    return {
        "losses": history.history["loss"],
        "weights": {v.name: v.numpy() for v in net.local_trainable_variables},
        "slots": sum(1 for _ in slots(net.optimizer, net.local_trainable_variables)),
    }


def several_buckets() -> dict[str, Any]:
    """Weights that take several buckets, most of them larger than a bucket."""
    usual, gather.MOST_BYTES = gather.MOST_BYTES, 300
    try:
        return weights_after_two_steps()
    finally:
        gather.MOST_BYTES = usual


def weights_after_two_steps() -> dict[str, Any]:
    net = Net((40, 20, 40))
    optimizer = tf_keras.optimizers.SGD(0.1, momentum=0.9)

    @smp.step
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((net(x) - 1.0) ** 2)
        return tape.gradient(loss, net.trainable_variables)

    @tf.function
    def train(x: tf.Tensor) -> None:
        sums = [gradient.accumulate() for gradient in step(x)]
        optimizer.apply_gradients(zip(sums, net.trainable_variables, strict=True))

    for number in range(2):
        train(tf.constant(batch(number)))
    return {v.name: v.numpy().tolist() for v in net.trainable_variables}


def started_twice() -> dict[str, Any]:
    """A training that goes on after `smp.shutdown`, as it was and without shares."""
    config = {"partitions": 1, "microbatches": 2, "seed": 1, "shard_optimizer_state": True}
    smp.init(config)
    net, made = Chain(20, 3), tf_keras.optimizers.SGD(0.1, momentum=0.9)
    step = stepped(net)

    def train(number: int) -> None:
        sums = [gradient.accumulate() for gradient in step(tf.constant(batch(number)))]
        made.apply_gradients(zip(sums, net.trainable_variables, strict=True))

    def held() -> list[str]:
        return [v.name for v, _, _ in slots(made, net.trainable_variables)]

    train(0)
    first = held()
    smp.shutdown()
    smp.init(config)
    train(1)
    weights = {v.name: v.numpy() for v in net.trainable_variables}
    second = held()
    smp.shutdown()
    smp.init({**config, "shard_optimizer_state": False})
    try:
        train(2)
    except Exception as error:
        return {"weights": weights, "first": first, "second": second, "error": str(error)}
    finally:
        smp.shutdown()
    return {"error": ""}


class Chain(smp.DistributedModel):
    """Dense layers without biases, as many as there are widths."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        start = tf_keras.initializers.RandomNormal(seed=7)
        self.chain = [layers.Dense(width, use_bias=False, kernel_initializer=start) for width in widths]

    def call(self, x: tf.Tensor) -> tf.Tensor:
        for layer in self.chain:
            x = layer(x)
        return x


def stepped(net: Any) -> Any:
    """A step that gives the gradients of a model's weights."""

    @smp.step
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((net(x) - 1.0) ** 2)
        return tape.gradient(loss, net.trainable_variables)

    return step


def two_models(folder: str) -> dict[str, Any]:
    """The second model has one weight, so that a replica has nothing of it; applied in a function within a function."""
    large, small = Chain(5, 40, 5), Chain(5)
    first, second = tf_keras.optimizers.Nadam(0.01), tf_keras.optimizers.Nadam(0.01)
    of_large, of_small = stepped(large), stepped(small)

    @tf.function
    def apply(gradients: Any) -> None:
        second.apply_gradients(zip(gradients, small.trainable_variables, strict=True))

    @tf.function
    def train(x: tf.Tensor) -> None:
        sums = [gradient.accumulate() for gradient in of_large(x)]
        first.apply_gradients(zip(sums, large.trainable_variables, strict=True))
        apply([gradient.accumulate() for gradient in of_small(x)])

    for number in range(3):
        train(tf.constant(batch(number)))
    checkpoint = tf.train.Checkpoint(large=large, small=small, first=first, second=second)
    smp.CheckpointManager(checkpoint, folder).save()
    weights = [*large.trainable_variables, *small.trainable_variables]
    return {
        "weights": [v.numpy() for v in weights],
        "iterations": [int(first.iterations), int(second.iterations)],
        "slots of the small": len(list(slots(second, small.trainable_variables))),
    }


def unequal() -> dict[str, Any]:
    """Replicas whose weights part between an evaluation and the first step that trains."""
    net, optimizer = Chain(5, 5, 5), tf_keras.optimizers.SGD(0.1)
    step = stepped(net)
    smp.step(lambda x: net(x))(tf.constant(batch(0)))
    net.set_weights([np.full((5, 5), 0.1 + smp.dp_rank(), np.float32)] * 3)
    for number in range(4):
        sums = [gradient.accumulate() for gradient in step(tf.constant(batch(number)))]
        optimizer.apply_gradients(zip(sums, net.trainable_variables, strict=True))
    return {}


def received() -> dict[str, Any]:
    """What each replica has of a step's gradients, and the norm of all."""
    net = Chain(5, 20, 30, 5)

    @smp.step(keep_microbatch_gradients=True)
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((net(x) - 1.0) ** 2)
        return tape.gradient(loss, net.trainable_variables)

    gradients = step(tf.constant(batch(0)))
    sums = [gradient.accumulate() for gradient in gradients]
    _, clipped_from = tf.clip_by_global_norm(sums, 1e-3)

    def has_values(gradient: Any) -> bool:
        try:
            return len(gradient.outputs) == 2
        except smp.errors.StepError:
            return False

    return {
        "gradients": [None if total is None else total.numpy() for total in sums],
        "is local": [gradient.is_local for gradient in gradients],
        "norm": float(smp.global_norm(sums)),
        "clipped from": float(clipped_from),
        "values of the first microbatch": [has_values(gradient) for gradient in gradients],
        "stored here": [not is_remote(v) for v in net.trainable_variables],
    }


class Sum(smp.DistributedModel):
    """A weight that is a sum of two, whose gradients are one tensor, between others."""

    def __init__(self) -> None:
        super().__init__()
        start = tf_keras.initializers.RandomNormal(seed=7)
        self.parts = [self.add_weight(f"part_{n}", (5, 5), initializer=start) for n in range(3)]
        self.head = layers.Dense(3, kernel_initializer=start)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.head(tf.matmul(x, self.parts[0] + self.parts[1]) @ self.parts[2])


def one_gradient_of_two() -> dict[str, Any]:
    """Three steps whose gradients are clipped, and averaged once more by the optimizer, which changes nothing."""
    net, optimizer = Sum(), smp.DistributedOptimizer(tf_keras.optimizers.SGD(0.5))
    step = stepped(net)

    @tf.function
    def train(x: tf.Tensor) -> tf.Tensor:
        sums, norm = smp.clip_by_global_norm([gradient.accumulate() for gradient in step(x)], 0.1)
        optimizer.apply_gradients(zip(sums, net.trainable_variables, strict=True))
        return norm

    norms = [float(train(tf.constant(batch(number)))) for number in range(3)]
    return {"norms": norms, "weights": [v.numpy() for v in net.trainable_variables]}


class Rows(smp.DistributedModel):
    """Two rows that are added to each of the batch: to a batch of one row, and their gradients are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = [self.add_weight(f"row_{n}", (1, 3), initializer="zeros") for n in range(2)]

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x + self.rows[0] + self.rows[1]


def one_row() -> dict[str, Any]:
    """Microbatches of two rows on one replica and of one on the other, and the other way around."""
    net, optimizer = Rows(), tf_keras.optimizers.SGD(0.5)
    step = stepped(net)
    for number, sizes in enumerate([(4, 2), (2, 4), (4, 4)]):
        begin = sum(sizes[: smp.dp_rank()])
        whole = np.random.RandomState(number).standard_normal((sum(sizes), 3)).astype(np.float32)
        sums = [gradient.accumulate() for gradient in step(whole[begin : begin + sizes[smp.dp_rank()]])]
        optimizer.apply_gradients(zip(sums, net.trainable_variables, strict=True))
    return {"weights": [v.numpy() for v in net.trainable_variables]}


def not_as_a_step_gives_them() -> dict[str, Any]:
    """What is said of gradients that no step has made, of accumulators, and of changed ones that Horovod is given."""
    net, optimizer = Chain(5, 20, 30, 5), smp.DistributedOptimizer(tf_keras.optimizers.SGD(0.1))
    step = stepped(net)
    sums, weights = [gradient.accumulate() for gradient in step(tf.constant(batch(0)))], net.trainable_variables
    filled = [tf.zeros_like(w) if g is None else g + 0.0 for g, w in zip(sums, weights, strict=True)]
    kept = [tf.Variable(g) for g in filled]
    doubled = [None if g is None else 2.0 * g for g in sums]
    own = [tf.fill([2, 2], 1.0 + smp.dp_rank())]

    def apply(gradients: Any) -> None:
        optimizer.apply_gradients(zip(gradients, weights, strict=True))

    def average_kept() -> Any:
        return smp.average_gradients([variable.read_value() for variable in kept])

    tries = {
        "of no step": lambda: apply([tf.ones_like(w) for w in weights]),
        "of no step, in a function": tf.function(lambda: apply([tf.ones_like(w) for w in weights])),
        "accumulators": lambda: smp.average_gradients(filled),
        "accumulators, in a function": tf.function(average_kept),
        "changed": lambda: smp.average_gradients(doubled),
    }
    said = {}
    for name, attempt in tries.items():
        try:
            attempt()
            said[name] = ""
        except (smp.errors.StepError, tf.errors.InvalidArgumentError) as error:
            said[name] = str(error)
    # All that is well goes on: zeros in place of None, averages that were changed, and the script's own.
    before = [w.numpy() for w in weights]
    apply(filled)
    changes = [float(np.abs(w.numpy() - b).max()) for w, b in zip(weights, before, strict=True)]
    averaged = [g.numpy().tolist() for g in smp.average_gradients([*own, None])[:1]]
    apply(smp.average_gradients([tf.fill(w.shape, 1.0 + smp.dp_rank()) for w in weights]))
    return {"said": said, "changes": changes, "averaged": averaged, "weights": [w.numpy() for w in weights]}


def added_up(filled: bool) -> dict[str, Any]:
    """The norm of gradients that were added up over two steps, with zeros or None for those of other replicas.

    With zeros, what is said of them.
    """
    net = Chain(5, 20, 30, 5)
    step, sums = stepped(net), []
    for number in range(2):
        found = [gradient.accumulate() for gradient in step(tf.constant(batch(number)))]
        sums = found if not sums else [a if a is None else a + b for a, b in zip(sums, found, strict=True)]
    if filled:
        sums = [tf.zeros_like(v) if a is None else a for a, v in zip(sums, net.trainable_variables, strict=True)]
    try:
        return {"norm": float(smp.global_norm(sums)), "said": ""}
    except tf.errors.InvalidArgumentError as error:
        return {"said": str(error)}


class ByLayer(tf_keras.optimizers.SGD):
    """Clips each gradient by what TensorFlow has for all of them."""

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        clipped = [(tf.clip_by_global_norm([g], 0.01)[0][0], v) for g, v in grads_and_vars]
        return super().apply_gradients(clipped, *args, **kwargs)


def clips_by_layer() -> dict[str, Any]:
    net, optimizer = Chain(5, 20, 30, 5), ByLayer(1.0)
    sums = [gradient.accumulate() for gradient in stepped(net)(tf.constant(batch(0)))]
    optimizer.apply_gradients(zip(sums, net.trainable_variables, strict=True))
    return {}


def sent() -> dict[str, Any]:
    """The bytes that this rank gives to the collectives of a step."""
    net = Net((20, 10, 97))
    with counted() as found:
        stepped(net)(tf.constant(batch(0)))
    here = [v for v in net.trainable_variables if not is_remote(v)]
    return {"sent": found, "of the stage": sum(v.shape.num_elements() for v in here)}


class Clipping(tf_keras.optimizers.SGD):
    """Clips by the norm of all gradients, as users' classes do."""

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        gradients, weights = zip(*grads_and_vars, strict=True)
        clipped, _ = tf.clip_by_global_norm(gradients, 0.01)
        return super().apply_gradients(zip(clipped, weights, strict=True), *args, **kwargs)


def own_optimizer(scaled: bool) -> dict[str, Any]:
    net, optimizer = Chain(5, 20, 5), Clipping(1.0)
    if scaled:
        optimizer = tf_keras.mixed_precision.LossScaleOptimizer(optimizer, dynamic=False, initial_scale=1.0)
    step = stepped(net)
    sums = [gradient.accumulate() for gradient in step(tf.constant(batch(0)))]
    here = [v for v in net.trainable_variables if not is_remote(v)]
    before = [v.numpy() for v in here]
    optimizer.apply_gradients(zip(sums, net.trainable_variables, strict=True))
    changes = [v.numpy() - b for v, b in zip(here, before, strict=True)]
    return {"square": float(sum(np.sum(change**2) for change in changes))}


def members() -> dict[str, Any]:
    """Models whose weights have the same names and shares, each with an update of its own."""

    def made() -> Any:
        return smp.DistributedModel(
            lambda: tf_keras.Sequential(
                [tf_keras.Input((5,)), *(layers.Dense(5, use_bias=False, name=f"fc{i}") for i in range(2))]
            )
        )

    def update_of(net: Any) -> Any:
        step, optimizer = stepped(net), tf_keras.optimizers.SGD(0.1, momentum=0.9)

        @tf.function
        def update(x: tf.Tensor) -> None:
            sums = [gradient.accumulate() for gradient in step(x)]
            optimizer.apply_gradients(zip(sums, net.trainable_variables, strict=True))

        return update

    nets = [made() for _ in range(3)]
    updates = [update_of(net) for net in nets]

    @tf.function
    def train(x: tf.Tensor) -> None:
        for update in updates:
            update(x)

    for number in range(4):
        train(tf.constant(batch(number)))
    return {"weights": [v.numpy() for net in nets for v in net.trainable_variables]}


def built_before_wrapping(folder: str) -> dict[str, Any]:
    """An optimizer that has slots for all weights, since it was built for a model that was wrapped afterwards."""
    plain = tf_keras.Sequential([tf_keras.Input((5,)), *(layers.Dense(5, use_bias=False) for _ in range(3))])
    optimizer = tf_keras.optimizers.Adam(0.01)
    optimizer.build(plain.trainable_variables)
    net = smp.DistributedModel(plain)
    step = stepped(net)
    for number in range(2):
        sums = [gradient.accumulate() for gradient in step(tf.constant(batch(number)))]
        optimizer.apply_gradients(zip(sums, net.trainable_variables, strict=True))
    smp.CheckpointManager(tf.train.Checkpoint(model=net, optimizer=optimizer), folder).save()
    return {}


def restored_after_another_start(folder: str) -> dict[str, Any]:
    """A checkpoint that is saved, and one that is restored, after smp.shutdown and before another step."""
    config = {"partitions": 1, "microbatches": 2, "seed": 1, "shard_optimizer_state": True}
    smp.init(config)
    net, optimizer = Chain(5, 20, 5), tf_keras.optimizers.Adam(0.01)
    step = stepped(net)

    def train(number: int) -> None:
        sums = [gradient.accumulate() for gradient in step(tf.constant(batch(number)))]
        optimizer.apply_gradients(zip(sums, net.trainable_variables, strict=True))

    checkpoint = tf.train.Checkpoint(model=net, optimizer=optimizer)
    train(0)
    smp.shutdown()
    smp.init({**config, "shard_optimizer_state": False})
    try:
        smp.CheckpointManager(checkpoint, folder).save()
        error = ""
    except Exception as raised:
        error = str(raised)
    smp.shutdown()
    smp.init(config)
    manager = smp.CheckpointManager(checkpoint, folder)
    manager.save()
    train(1)
    wanted = [v.numpy() for v in net.trainable_variables]
    smp.shutdown()
    smp.init(config)
    smp.CheckpointManager(checkpoint, folder).restore()
    train(1)
    found = [v.numpy() for v in net.trainable_variables]
    smp.shutdown()
    return {"wanted": wanted, "found": found, "error": error}


def compiled() -> str:
    """What is said of updates that XLA is to compile."""
    net, optimizer = Chain(5, 5), tf_keras.optimizers.SGD(0.1)
    step = stepped(net)
    sums = [gradient.accumulate() for gradient in step(tf.constant(batch(0)))]

    @tf.function(jit_compile=True)
    def apply(gradients: Any) -> None:
        optimizer.apply_gradients(zip(gradients, net.trainable_variables, strict=True))

    try:
        apply(sums)
    except Exception as error:
        return str(error)
    return "nothing"


def built_too_early() -> str:
    """What is said of an optimizer that is built before it is decided which replica has which slots."""
    net = Net()
    net.build((None, 5))
    try:
        tf_keras.optimizers.Adam().build(net.trainable_variables)
    except smp.errors.StepError as error:
        return str(error)
    return "nothing"
