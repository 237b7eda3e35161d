"""What went wrong when a weight was first cut into rows, each of which trained otherwise than one process or failed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
import tf_keras

import smp_tf as smp
from smp_tf.sharding import layouts, row_blocks
from smp_tf.variables.store import storage_of
from tests.distributed.cases.cut_weights import Net, batch

CONFIG = {"partitions": 1, "microbatches": 2, "seed": 1}


class Sending(tf_keras.optimizers.SGD):
    """Has the norm of all replicas' gradients, which are equal, from a collective of its own."""

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        hvd.allreduce(tf.constant(1.0), name=f"own_{int(self.iterations)}")
        return super().apply_gradients(grads_and_vars, *args, **kwargs)


def stepped(net: Any, some: Callable[[Any], list[Any]] | None = None) -> Any:
    @smp.step
    def step(words: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((net(words) - 1.0) ** 2)
        return tape.gradient(loss, some(net) if some else net.trainable_variables)

    return step


def update(net: Any, step: Any, optimizer: Any, number: int) -> None:
    sums = [gradient.accumulate() for gradient in step(tf.constant(batch(number)))]
    optimizer.apply_gradients(zip(sums, net.trainable_variables, strict=True))


def updated(net: Any, optimizer: Any, times: int) -> dict[str, Any]:
    """The weights after some steps."""
    step = stepped(net)
    for number in range(times):
        update(net, step, optimizer, number)
    return weights(net)


def weights(net: Any) -> dict[str, Any]:
    return {v.name: v.numpy() for v in net.local_trainable_variables}


def run(trap: str) -> dict[str, Any]:
    """The weights after some steps, or the error there was.

    Args:
        trap: name of a function below.
    """
    tf_keras.backend.set_floatx("float64")
    tf_keras.mixed_precision.set_global_policy("float64")
    try:
        return {"weights": globals()[trap](), "error": ""}
    except smp.errors.StepError as error:
        return {"weights": {}, "error": str(error)}


def constraint() -> Any:
    """One that goes by columns."""
    net, optimizer = Net(False), tf_keras.optimizers.Adam(0.01)
    net.lookup.table._constraint = tf_keras.constraints.MaxNorm(0.5, axis=0)
    return updated(net, optimizer, 3)


def slots_before() -> Any:
    """An optimizer is built for all weights before a step has gradients of the large one."""
    net, optimizer = Net(False), tf_keras.optimizers.Adam(0.01)
    of_head = stepped(net, lambda net: net.head.trainable_variables)
    sums = [gradient.accumulate() for gradient in of_head(tf.constant(batch(0)))]
    optimizer.build(net.trainable_variables)
    optimizer.apply_gradients(zip(sums, net.head.trainable_variables, strict=True))
    return updated(net, optimizer, 3)


def clipped_later() -> Any:
    net, optimizer = Net(False), tf_keras.optimizers.Adam(0.01)
    step = stepped(net)
    update(net, step, optimizer, 0)
    optimizer.clipnorm = 0.01
    update(net, step, optimizer, 1)
    return weights(net)


def of_no_step() -> Any:
    """Gradients that nobody has averaged."""
    net, optimizer = Net(False), tf_keras.optimizers.SGD(0.1)
    step = stepped(net)
    update(net, step, optimizer, 0)
    with tf.GradientTape() as tape:
        penalty = tf.reduce_sum(net.lookup.table**2) * float(batch(1)[0, 0])
    optimizer.apply_gradients([(tape.gradient(penalty, net.lookup.table), net.lookup.table)])
    return weights(net)


def changed() -> Any:
    """Averages that a script has changed outside a function bear no mark, and are the same on all replicas."""
    net, optimizer = Net(False), tf_keras.optimizers.SGD(0.1, momentum=0.9)
    step = stepped(net)
    for number in range(2):
        sums = [gradient.accumulate() for gradient in step(tf.constant(batch(number)))]
        halves = [None if total is None else total * 0.5 for total in sums]
        optimizer.apply_gradients(zip(halves, net.trainable_variables, strict=True))
    return weights(net)


def in_a_scope() -> Any:
    """Decay is left out by a name, in a scope that a function has opened."""
    net, optimizer = Net(False), tf_keras.optimizers.Adam(0.01, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["^table"])
    step = stepped(net)

    @tf.function
    def train(words: tf.Tensor) -> None:
        sums = [gradient.accumulate() for gradient in step(words)]
        with tf.name_scope("train"):
            optimizer.apply_gradients(zip(sums, net.trainable_variables, strict=True))

    for number in range(3):
        train(tf.constant(batch(number)))
    return weights(net)


def of_a_model_before() -> Any:
    """The model is gone whose training has made the block; the next one has a layer of it."""

    def first() -> Any:
        net, optimizer = Net(False), tf_keras.optimizers.legacy.Adam(0.01)
        step = stepped(net)
        update(net, step, optimizer, 0)
        return net.lookup

    lookup = first()
    gc.collect()
    shares = bool(layouts.are_shared())
    smp.shutdown()
    smp.init({**CONFIG, "shard_optimizer_state": shares})
    net, optimizer = Net(False), tf_keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.01)
    net.lookup = lookup
    return updated(net, optimizer, 3)


def sending() -> Any:
    """Only the stage that has the large weight could try this optimizer out."""
    return updated(Net(False), Sending(0.1), 2)


def two_optimizers(directory: str) -> dict[str, Any]:
    """One updates rows and another one the whole weight: each slot is saved as it is.

    Args:
        directory: of the checkpoint, which is saved where the replicas share slots and restored where not.
    """
    tf_keras.backend.set_floatx("float64")
    tf_keras.mixed_precision.set_global_policy("float64")
    net = Net(False)
    ones = {"sgd": tf_keras.optimizers.SGD(0.1, momentum=0.9), "factored": tf_keras.optimizers.Adafactor(0.1)}
    step = stepped(net)
    manager = smp.CheckpointManager(tf.train.Checkpoint(model=net, **ones), directory)
    is_saving = layouts.are_shared()
    if not is_saving:
        manager.restore()
    for number in range(4 if is_saving else 2):
        for optimizer in ones.values():
            update(net, step, optimizer, number if is_saving else 2 + number)
        if is_saving and number == 1:
            manager.save()
    return {"weights": weights(net)}


def memory() -> dict[str, Any]:
    """The rows that blocks have between steps: none, also behind `fit` and `build`."""
    tf_keras.backend.set_floatx("float32")
    tf_keras.mixed_precision.set_global_policy("float32")
    net = Net(False)
    net.compile(optimizer=tf_keras.optimizers.Adam(0.01), loss="mse")
    x = np.concatenate([batch(number) for number in range(4)])
    seen: list[int] = []

    def look() -> None:
        block = storage_of(net.lookup.table).block
        assert row_blocks.is_block(block)
        value = tf.raw_ops.ReadVariableOp(resource=block.handle, dtype=block.dtype)
        seen.append(int(tf.shape(value)[0]))

    callback = tf_keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: look())
    net.fit(x, np.ones([len(x), 2]), batch_size=6, epochs=2, verbose=0, callbacks=[callback])
    look()
    tf_keras.optimizers.Adam(0.01).build(net.trainable_variables)
    look()
    return {"seen": seen}
