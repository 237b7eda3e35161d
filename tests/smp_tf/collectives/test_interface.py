"""What asks for collectives does not know who does them, and each has a group and a name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import tensorflow as tf

from smp_tf.collectives import horovod, interface
from smp_tf.job_state import JobState
from smp_tf.replicas.sums import sum_over_replicas

METHODS = [name for name in vars(interface.Collectives) if not name.startswith("_")]


def test_every_collective_has_a_group_and_a_name() -> None:
    assert METHODS == ["all_reduce", "all_gather", "all_to_all", "broadcast"]
    for name in METHODS:
        assert {"group", "name"} < set(inspect.signature(getattr(interface.Collectives, name)).parameters), name


@pytest.mark.parametrize("name", METHODS)
def test_horovod_takes_what_the_interface_says(name: str) -> None:
    wanted = inspect.signature(getattr(interface.Collectives, name))
    assert inspect.signature(getattr(horovod.Horovod, name)) == wanted


def test_another_library_may_do_them(reduced: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubles:
        def all_reduce(self, tensors: Any, group: Any, name: str, *, handles: Any = ()) -> list[tf.Tensor]:
            assert (group, name, handles) == ("the set of this stage", "g", ())
            return [tensor * 2 for tensor in tensors]

    monkeypatch.setattr(interface, "_of_job", JobState(Doubles))
    [found] = sum_over_replicas([tf.constant([1.0])], "g")
    assert found.numpy().tolist() == [2.0]
    assert reduced == []
