"""What the tests of the user-facing room share: smp_tf in this one process, and Keras as it was afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import h5py
import pytest

import smp_tf as smp
from smp_tf.job import runtime
from smp_tf.partition.mesh import Mesh


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a cluster's node, whose batch system sets such variables, these tests are one process of their own."""
    for name in ("HOROVOD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS", "SM_HP_MP_PARAMETERS"):
        monkeypatch.delenv(name, raising=False)


def _reset_keras() -> None:
    import tf_keras

    tf_keras.backend.clear_session()
    tf_keras.backend.set_floatx("float32")
    tf_keras.mixed_precision.set_global_policy("float32")


@pytest.fixture
def keras_defaults() -> Iterator[None]:
    """Fresh layer names, float32, before and after the test."""
    _reset_keras()
    yield
    _reset_keras()


@pytest.fixture
def init(keras_defaults: None) -> Iterator[Callable[..., None]]:
    """Starts smp_tf in this process, which makes one partition; microbatches are real. Ended after the test.

    Call it as `init(microbatches=4)`, with any key of the configuration; the seed is 5 unless given.
    """

    def start(**config: object) -> None:
        smp.init({"partitions": 1, "seed": 5, **config})

    yield start
    smp.shutdown()


@pytest.fixture
def two_partitions(init: Callable[..., None]) -> Iterator[Callable[[], None]]:
    """Makes this process, once it is initialised and from the call on, rank 0 of two partitions; rank 1 is nobody."""
    before: list[runtime.Runtime] = []

    def pretend() -> None:
        before.append(runtime.current())
        alone = before[0].topology
        topology = dataclasses.replace(
            alone, mesh=Mesh(2, 2), local_size=2, hosts=alone.hosts * 2, pids=(alone.pids[0], alone.pids[0] + 1)
        )
        runtime.install(dataclasses.replace(before[0], topology=topology))

    yield pretend
    if before:
        runtime.install(before[0])


@pytest.fixture
def hdf5_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the HDF5 datasets whose values were read, in order."""
    read: list[str] = []
    original = h5py.Dataset.__array__

    def counted(dataset: h5py.Dataset, *args: Any, **kwargs: Any) -> Any:
        read.append(dataset.name)
        return original(dataset, *args, **kwargs)

    monkeypatch.setattr(h5py.Dataset, "__array__", counted)
    return read


@pytest.fixture
def reduced(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What Horovod was asked to reduce, on a rank of three replicas that all hold the same values."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    asked: list[dict[str, Any]] = []

    def grouped_allreduce(tensors: list[Any], **kwargs: Any) -> list[Any]:
        asked.append({"types": [t.dtype for t in tensors], **kwargs})
        return [t * 3 for t in tensors]

    def allgather(tensor: Any, **kwargs: Any) -> Any:
        asked.append({"gathered": tensor.dtype, **kwargs})
        return tf.concat([tensor] * 3, 0)

    running = SimpleNamespace(
        topology=SimpleNamespace(group_size=lambda kind: {"rdp": 3}[kind.value], replicas=3),
        process_sets=SimpleNamespace(dp="the set of this stage"),
        config=SimpleNamespace(gradient_compression=None, gradient_offload=False),
    )
    monkeypatch.setattr(runtime, "current", lambda: running)
    monkeypatch.setattr(hvd, "grouped_allreduce", grouped_allreduce)
    monkeypatch.setattr(hvd, "allgather", allgather)
    return asked
