"""Horovod's layers that take moments over all processes are found by the method that does it."""

from __future__ import annotations

import inspect
import sys

import horovod.tensorflow as hvd
import pytest

from smp_tf.collectives.horovod_layers import methods_of_moments


def test_the_method_is_horovods_and_takes_what_it_took() -> None:
    [(owner, name)] = methods_of_moments()
    assert owner is hvd.SyncBatchNormalization
    assert list(inspect.signature(owner.__dict__[name]).parameters)[:4] == [
        "self", "inputs", "reduction_axes", "keep_dims",
    ]  # fmt: skip


def test_where_horovod_is_not_imported_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "horovod.tensorflow.sync_batch_norm")
    assert methods_of_moments() == []
