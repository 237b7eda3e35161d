"""Ops of Horovod and the like inside a step: refused in a split model, where they would wait for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
import tf_keras
from horovod.tensorflow import mpi_ops

import smp_tf as smp
from smp_tf.errors import StepError
from smp_tf.job import runtime
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.steps import collectives_in_steps
from smp_tf.steps.collectives_in_steps import refuse_sums_in_functions, refuse_what_hangs


class Net(smp.DistributedModel):
    """Calls a function between two layers."""

    def __init__(self, between: Callable[[tf.Tensor], tf.Tensor]) -> None:
        super().__init__()
        self.first = tf_keras.layers.Dense(3)
        self.between = between if isinstance(between, tf_keras.layers.Layer) else tf_keras.layers.Lambda(between)
        self.last = tf_keras.layers.Dense(1)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.last(self.between(self.first(x)))


def traced(between: Callable[[tf.Tensor], tf.Tensor], *, trains: bool = True) -> OpGraph:
    """The graph of a step of a model that calls the function."""
    model = Net(between)

    @smp.step
    def train(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True))
        return loss, tape.gradient(loss, model.trainable_variables) if trains else None

    return train.trace(tf.ones([4, 2])).graph


def reduced(x: tf.Tensor) -> tf.Tensor:
    return mpi_ops._allreduce(x, name="mine")


@tf.function(reduce_retracing=True)
def in_a_function(x: tf.Tensor) -> tf.Tensor:
    return reduced(x)


def in_a_loop(x: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(lambda n, y: n < 2, lambda n, y: (n + 1, in_a_function(y)), [0, x])[1]


def in_a_choice(x: tf.Tensor) -> tf.Tensor:
    return tf.cond(tf.reduce_sum(x) > 0, lambda: in_a_loop(x), lambda: x)


def of_tensorflow(x: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.CollectiveReduceV2(
        input=x, group_size=2, group_key=1, instance_key=1, ordering_token=[], merge_op="Add", final_op="Id"
    )


def of_nccl(x: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.NcclAllReduce(input=x, reduction="sum", num_devices=2, shared_name="n")


OPS: dict[str, tuple[Callable[[tf.Tensor], tf.Tensor], str]] = {
    "Horovod": (reduced, "HorovodAllreduce"),
    "function": (in_a_function, "HorovodAllreduce"),
    "loop": (in_a_loop, "HorovodAllreduce"),
    "choice": (in_a_choice, "HorovodAllreduce"),
    "alltoall": (lambda x: mpi_ops.alltoall(x), "HorovodAlltoall"),
    "TensorFlow": (of_tensorflow, "CollectiveReduceV2"),
    "NCCL": (of_nccl, "NcclAllReduce"),
}


@pytest.mark.parametrize("kind", OPS)
def test_an_op_that_waits_for_other_processes_is_refused_in_a_split_model(init: Callable[..., None], kind: str) -> None:
    """Only the ranks of one stage would run it: they once waited until stall_timeout."""
    init(microbatches=2)
    between, op = OPS[kind]
    graph = traced(between, trains=kind not in ("TensorFlow", "NCCL", "loop", "choice"))
    with pytest.raises(
        StepError,
        match=rf"^Step 'train' has an op {op} in layer 'net/lambda' \(Lambda\)(, within the function that '.*' runs)?"
        r"\. In it a process waits for others, and in a model of 2 partitions only .*after the step",
    ):
        refuse_what_hangs(graph, "train", 2, 1)
    # Alone a process waits for nobody, and replicas of a whole model run the same step.
    refuse_what_hangs(graph, "train", 1, 1)
    refuse_what_hangs(graph, "train", 1, 2)


@pytest.mark.parametrize(
    ("function", "op"),
    [(mpi_ops.allgather, "HorovodAllgather"), (lambda x: mpi_ops.broadcast(x, 0), "HorovodBroadcast")],
    ids=["allgather", "broadcast"],
)
def test_an_op_with_another_gradient_on_every_replica_is_refused(
    init: Callable[..., None], function: Callable[[tf.Tensor], tf.Tensor], op: str
) -> None:
    """It was once said that the ranks had built different models."""
    init(microbatches=2)
    with pytest.raises(StepError, match=rf"has an op {op} in layer .*its gradient, which is another on every process"):
        refuse_what_hangs(traced(function), "train", 1, 2)
    refuse_what_hangs(traced(function, trains=False), "train", 1, 2)


def test_what_asks_nothing_of_others_is_left_alone(init: Callable[..., None]) -> None:
    init(microbatches=2)
    graph = traced(lambda x: x * tf.cast(mpi_ops.size_op() + mpi_ops.rank_op(), x.dtype))
    assert any(node.op == "HorovodSize" for node in graph.nodes)
    refuse_what_hangs(graph, "train", 2, 2)


def test_a_split_model_is_looked_at_when_its_step_is_traced(
    init: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    init(microbatches=2)
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(collectives_in_steps, "refuse_what_hangs", lambda graph, *rest: asked.append(rest))
    model = Net(tf.identity)

    @smp.step
    def step(x: tf.Tensor) -> Any:
        return model(x)

    step(tf.ones([4, 2]))
    assert asked == [("step", 1, 1)]


def in_a_choice(function: Callable[[tf.Tensor], tf.Tensor]) -> Callable[[tf.Tensor], tf.Tensor]:
    return lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: function(x), lambda: x)


def twice(function: Callable[[tf.Tensor], tf.Tensor]) -> Callable[[tf.Tensor], tf.Tensor]:
    return lambda x: tf.while_loop(lambda n, y: n < 2, lambda n, y: (n + 1, function(y)), [0, x])[1]


@pytest.mark.parametrize("around", [in_a_choice, twice])
def test_moments_over_replicas_in_a_function_are_refused(
    init: Callable[..., None], monkeypatch: pytest.MonkeyPatch, around: Callable[[Any], Any]
) -> None:
    """The function would run as one op, without the sends and receives that are written into a segment."""
    init(microbatches=2)
    monkeypatch.setattr(type(runtime.current().topology), "replicas", property(lambda self: 2))
    norm = tf_keras.layers.BatchNormalization(synchronized=True)
    norm.build((None, 3))
    graph = traced(around(lambda x: norm(x, training=True)))
    with pytest.raises(StepError, match=r"^In step 'train', layer 'net/lambda' \(Lambda\) takes moments over .* leave"):
        refuse_sums_in_functions(graph, "train")
    # What a tf.function does is done in the step itself.
    refuse_sums_in_functions(traced(tf.function(lambda x: norm(x, training=True))), "train")
