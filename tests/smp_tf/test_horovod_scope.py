"""Horovod's functions while smp_tf is initialised: over the replicas, over the world, or refused."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tensorflow as tf
import tf_keras

import smp_tf as smp
from smp_tf import horovod_scope
from smp_tf.errors import StepError
from smp_tf.job import runtime
from smp_tf.optimizer import distributed_optimizer
from smp_tf.partition.mesh import Mesh
from smp_tf.partition.spread import EVERYWHERE
from smp_tf.replicas import gradient_marks
from smp_tf.sharding import layouts, receivers
from tests import quick_import
from tests.full_only import params

ROOT = Path(__file__).resolve().parents[2]


class Group:
    """Stands for a process set."""

    def __init__(self, number: int, members: int) -> None:
        self.process_set_id, self._members = number, members

    def size(self) -> int:
        return self._members


DP = Group(3, 2)


@pytest.fixture
def asked() -> list[tuple[Any, ...]]:
    return []


@pytest.fixture
def hvd(monkeypatch: pytest.MonkeyPatch, asked: list[tuple[Any, ...]]) -> ModuleType:
    """Horovod, with collectives that only note what they are asked, over two processes that have the same values."""
    import horovod.tensorflow as hvd

    fake = ModuleType("horovod.tensorflow")
    fake.__dict__.update(hvd.__dict__)
    world = Group(0, 4)

    def allreduce(tensor, average=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=world):
        asked.append(("allreduce", process_set.process_set_id, op))
        return tensor * (2.0 if op == hvd.Sum else 1.0)

    def grouped_allreduce(tensors, average=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=world):
        asked.append(("grouped_allreduce", process_set.process_set_id, len(tensors)))
        return [t * 10.0 for t in tensors]

    def broadcast(tensor, root_rank, name=None, process_set=world):
        asked.append(("broadcast", process_set.process_set_id, root_rank))
        return tensor

    def broadcast_variables(variables, root_rank, process_set=world, inplace=False):
        asked.append(("broadcast_variables", process_set.process_set_id, root_rank, [v.name for v in variables]))

    def broadcast_object(obj, root_rank=0, session=None, name=None, process_set=world):
        asked.append(("broadcast_object", process_set.process_set_id, root_rank))
        return obj

    def allgather(tensor, name=None, process_set=world):
        asked.append(("allgather", process_set.process_set_id))
        return tf.concat([tensor, tensor], 0)

    def DistributedOptimizer(optimizer, name=None, compression=None, op=hvd.Average, backward_passes_per_step=1):  # noqa: N802
        raise AssertionError("Horovod's own is not to be used")

    mine = [allreduce, grouped_allreduce, broadcast, broadcast_variables, broadcast_object, allgather]
    for function in (*mine, DistributedOptimizer):
        setattr(fake, function.__name__, function)
    for name in ("rank", "size", "init", "shutdown", "join"):
        setattr(fake, name, lambda name=name: f"Horovod's {name}")
    horovod_scope.replace_functions(fake)
    return fake


@pytest.fixture
def replicas(init: Callable[..., None]) -> Iterator[None]:
    """This process is rank 3 of 2 partitions and 2 replicas, under the drop-in alias."""
    init()
    horovod_scope.mean_replicas()
    before = runtime.current()
    topology = dataclasses.replace(
        before.topology, mesh=Mesh(4, 2), rank=3, local_size=4, hosts=before.topology.hosts * 4, pids=(0, 0, 0, 1)
    )
    sets = dataclasses.replace(before.process_sets, dp=DP)  # type: ignore[arg-type]
    runtime.install(dataclasses.replace(before, topology=topology, process_sets=sets))
    yield
    runtime.install(before)


def test_without_init_everything_is_horovods(hvd: ModuleType, asked: list[Any]) -> None:
    assert (hvd.rank(), hvd.size(), hvd.init()) == ("Horovod's rank", "Horovod's size", "Horovod's init")
    assert float(hvd.allreduce(tf.constant(3.0), op=hvd.Sum)) == 6.0
    assert asked == [("allreduce", 0, hvd.Sum)]


def test_ranks_and_sizes_are_those_of_the_replicas(hvd: ModuleType, replicas: None) -> None:
    assert (hvd.rank(), hvd.size()) == (1, 2)
    assert hvd.init() is None
    assert hvd.shutdown() is None


def test_shutdown_ends_it(hvd: ModuleType, init: Callable[..., None]) -> None:
    init()
    horovod_scope.mean_replicas()
    assert (hvd.rank(), hvd.size()) == (0, 1)
    smp.shutdown()
    smp.init({"partitions": 1})
    assert (hvd.rank(), hvd.size()) == ("Horovod's rank", "Horovod's size")


def test_what_this_rank_does_not_have_is_left_out(hvd: ModuleType, replicas: None, asked: list[Any]) -> None:
    assert hvd.allreduce(None) is None
    assert hvd.broadcast(None, 0) is None
    assert asked == []
    grouped = hvd.grouped_allreduce([None, tf.constant(1.0), None, tf.constant(2.0)])
    assert [None if t is None else float(t) for t in grouped] == [None, 10.0, None, 20.0]
    assert hvd.grouped_allreduce([None]) == [None]
    assert asked == [("grouped_allreduce", 3, 2)]


def test_gradients_that_are_averaged_cost_nothing(hvd: ModuleType, replicas: None, asked: list[Any]) -> None:
    gradient = gradient_marks.mark(tf.constant([1.0, 2.0]), spread=EVERYWHERE)
    assert hvd.allreduce(gradient) is gradient
    assert hvd.allreduce(gradient, average=True) is gradient
    assert hvd.allreduce(gradient, op=hvd.Sum).numpy().tolist() == [2.0, 4.0]
    assert hvd.allreduce(gradient, postscale_factor=0.5).numpy().tolist() == [0.5, 1.0]
    assert asked == []
    kept, other = hvd.grouped_allreduce([gradient, tf.constant(1.0)])
    assert (kept is gradient, float(other)) == (True, 10.0)
    hvd.allreduce(gradient, op=hvd.Max)
    assert asked == [("grouped_allreduce", 3, 1), ("allreduce", 3, hvd.Max)]


def test_what_may_be_a_changed_average_is_refused_where_only_one_replica_has_it(
    hvd: ModuleType, replicas: None, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once waited: the other replica had None in its place."""
    monkeypatch.setattr(layouts, "are_received_apart", lambda: True)
    monkeypatch.setattr(receivers, "owners_of_shape", lambda tensor: {1} if tensor.shape == [2] else set())
    changed = 2.0 * tf.constant([1.0, 2.0])
    with pytest.raises(StepError, match=r"hvd\.allreduce was given a tensor of shape \(2,\), as weights .* replica 1 "):
        hvd.allreduce(changed)
    with pytest.raises(StepError, match=r"hvd\.grouped_allreduce was given a tensor of shape \(2,\)"):
        hvd.grouped_allreduce([None, tf.constant(1.0), changed])
    assert asked == []
    # A loss, and what comes of a step.
    assert float(hvd.allreduce(tf.constant(3.0))) == 3.0
    gradient = gradient_marks.mark(tf.constant([1.0, 2.0]), is_of_step=True)
    assert hvd.allreduce(gradient) is gradient


def test_other_tensors_are_reduced_over_the_replicas(hvd: ModuleType, replicas: None, asked: list[Any]) -> None:
    assert float(hvd.allreduce(tf.constant(3.0))) == 3.0
    assert hvd.allgather(tf.constant([3.0])).numpy().tolist() == [3.0, 3.0]
    hvd.allreduce(tf.constant(3.0), process_set=Group(7, 2))
    hvd.allreduce(tf.constant(3.0), process_set=Group(0, 4))
    assert asked == [("allreduce", 3, hvd.Average), ("allgather", 3), ("allreduce", 7, None), ("allreduce", 0, None)]


def test_roots_are_replicas(hvd: ModuleType, replicas: None, asked: list[Any]) -> None:
    """Stage 1 is on the ranks 1 and 3."""
    hvd.broadcast_variables([tf.Variable(1.0, name="mine")], root_rank=0)
    hvd.broadcast_variables((v for v in [tf.Variable(1.0, name="made")]), root_rank=1)
    assert hvd.broadcast_object({"a": 1}) == {"a": 1}
    assert asked == [
        ("broadcast_variables", 3, 1, ["mine:0"]),
        ("broadcast_variables", 3, 3, ["made:0"]),
        ("broadcast_object", 3, 1),
    ]
    with pytest.raises(StepError, match=r"root_rank=2\. With smp_tf hvd means the 2 replicas .*: use 0 to 1"):
        hvd.broadcast(tf.constant(1.0), 2)


def test_weights_of_other_ranks_are_not_broadcast(
    hvd: ModuleType, replicas: None, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = tf.Variable(1.0, name="mine"), tf.Variable(1.0, name="other")
    monkeypatch.setattr("smp_tf.variables.store.is_remote", lambda variable: variable is other)
    hvd.broadcast_variables([other, mine], 0)
    assert asked == [("broadcast_variables", 3, 1, ["mine:0"])]


def test_one_replica_reduces_with_nobody(hvd: ModuleType, init: Callable[..., None], asked: list[Any]) -> None:
    init()
    horovod_scope.mean_replicas()
    x, v = tf.constant([1.0, 2.0]), tf.Variable(1.0)
    assert hvd.allreduce(x) is x
    assert hvd.allreduce(x, op=hvd.Sum, prescale_factor=3.0).numpy().tolist() == [3.0, 6.0]
    assert hvd.grouped_allreduce([x, None]) == [x, None]
    assert (hvd.allgather(x) is x, hvd.broadcast(x, 0) is x, hvd.broadcast_variables([v], 0)) == (True, True, None)
    assert (hvd.broadcast_object(5), hvd.allgather_object(5)) == (5, [5])
    assert asked == []


def test_joining_is_refused(hvd: ModuleType, replicas: None) -> None:
    with pytest.raises(StepError, match=r"hvd.join\(\) works over all processes only"):
        hvd.join()


def test_a_distributed_optimizer_averages_what_is_not_averaged(
    hvd: ModuleType, replicas: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for gradients of a step, which are; once for the script's own."""
    averaged: list[list[bool]] = []

    def average_gradients(gradients: list[Any]) -> list[Any]:
        averaged.append([gradient_marks.mark_of(g).is_average for g in gradients])
        return gradients

    monkeypatch.setattr(distributed_optimizer, "average_gradients", average_gradients)
    plain = tf_keras.optimizers.SGD(1.0)
    optimizer = hvd.DistributedOptimizer(plain, compression=hvd.Compression.fp16)
    a, b = tf.Variable(1.0), tf.Variable(1.0)
    optimizer.apply_gradients([(gradient_marks.mark(tf.constant(0.25), spread=EVERYWHERE), a), (tf.constant(0.5), b)])
    assert (optimizer is plain, averaged) == (True, [[True, False]])
    assert (float(a), float(b)) == (0.75, 0.5)
    with pytest.raises(StepError, match="backward_passes_per_step, does not fit"):
        hvd.DistributedOptimizer(plain, backward_passes_per_step=2)


class Net(smp.DistributedModel):
    def __init__(self) -> None:
        super().__init__()
        self.head = tf_keras.layers.Dense(1)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.head(x)


def test_a_plain_script_is_told_of_the_average(hvd: ModuleType, init: Callable[..., None], asked: list[Any]) -> None:
    init(microbatches=2)
    model = Net()

    @smp.step
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x))
        return tape.gradient(loss, model.trainable_variables), loss

    gradients, loss = step(tf.ones([4, 2]))
    for given in (gradients[0].accumulate(), gradients[0], None):
        with pytest.raises(StepError, match=r"smp\.average_gradients"):
            hvd.allreduce(given)
    with pytest.raises(StepError, match=r"variable 'net/dense/kernel:0' of a model that is split.*average_gradients"):
        hvd.broadcast_variables(model.variables, root_rank=0)
    assert asked == []
    hvd.allreduce(loss.reduce_mean())
    hvd.allreduce(gradients[0].accumulate(), process_set=Group(7, 2))
    hvd.broadcast_variables([tf.Variable(1.0, name="own")], root_rank=0)
    assert asked == [
        ("allreduce", 0, None),
        ("allreduce", 7, None),
        ("broadcast_variables", 0, 0, ["own:0"]),
    ]
    assert hvd.rank() == "Horovod's rank"


def test_a_collective_inside_a_step_is_refused(hvd: ModuleType, init: Callable[..., None]) -> None:
    init(microbatches=2)
    horovod_scope.mean_replicas()
    model = Net()

    @smp.step
    def step(x: tf.Tensor) -> Any:
        return hvd.allreduce(tf.reduce_mean(model(x)))

    with pytest.raises(StepError, match=r"hvd.allreduce was called inside a step.*Call it after the step"):
        step(tf.ones([4, 2]))


def test_inside_a_step_a_distributed_tape_is_a_tape(hvd: ModuleType, replicas: None) -> None:
    from smp_tf.variables.model_context import set_step_being_traced

    tape = tf.GradientTape()
    before = set_step_being_traced(object())
    try:
        assert hvd.DistributedGradientTape(tape) is tape
    finally:
        set_step_being_traced(before)


# Where smp_tf is first, test_public_names shows it, too.
@pytest.mark.parametrize("first", params(["import horovod.tensorflow", "import smp_tf"], {"import smp_tf"}))
def test_horovod_may_be_imported_before_or_after(first: str) -> None:
    second = "import smp_tf" if "horovod" in first else "import horovod.tensorflow"
    code = f"{first}; {second}; from horovod.tensorflow import allreduce, rank; print(rank.smp_original is not None)"
    done = subprocess.run(
        [sys.executable, "-c", quick_import.CODE + code],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.strip() == "True", done.stderr
