"""Replicas tell each other of their batches: that there is one, its samples, and what it is made of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from smp_tf.errors import RankMismatchError
from smp_tf.training import replica_batches
from smp_tf.training.replica_batches import ReplicaBatches, SizesOfReplicas


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the other replica says."""
    said: list[Any] = []
    here = SimpleNamespace(topology=SimpleNamespace(replicas=2))
    monkeypatch.setattr(replica_batches, "runtime", SimpleNamespace(current=lambda: here))
    gather = SimpleNamespace(allgather_json=lambda mine, *_, **__: [mine, said.pop(0)])
    monkeypatch.setattr(replica_batches, "exchange", gather)
    return said


def batch(samples: int, width: int = 6) -> Any:
    return tf.zeros([samples, width]), tf.zeros([samples], tf.int32)


@pytest.mark.parametrize(
    ("theirs", "is_alike"),
    [
        ([5, [["float32", [6]], ["int32", []]]], True),
        ([5, [["float32", [7]], ["int32", []]]], False),
        ([5, [["float32", [6]], ["int64", []]]], False),
    ],
)
def test_batches_are_alike_but_for_their_samples(others: list[Any], theirs: Any, is_alike: bool) -> None:
    others.append(theirs)
    found = ReplicaBatches(True).next(iter([batch(8)]))
    assert (found.sizes, found.is_alike) == ([8, 5], is_alike)


def test_a_replica_without_a_batch_is_named(others: list[Any]) -> None:
    others.append(None)
    with pytest.raises(RankMismatchError, match="The data of replica 1 of 2 ended before batch 1 of the training"):
        ReplicaBatches(True).next(iter([batch(8)]))


def test_all_end_together(others: list[Any]) -> None:
    others.append(None)
    with pytest.raises(StopIteration):
        ReplicaBatches(True).next(iter([]))


def test_an_evaluation_asks_nobody(others: list[Any]) -> None:
    assert ReplicaBatches(False).next(iter([batch(8)])).sizes == [8]


def test_two_sets_of_sizes_get_programs_of_their_own() -> None:
    sets = SizesOfReplicas()
    seen = [(8, 8), (8, 5), (8, 8), (5, 8), (8, 5)]
    assert [sets.own(sizes) for sizes in seen] == [(8, 8), (8, 5), (8, 8), None, (8, 5)]
    # Of the programs that other sizes share, all replicas come to the first together.
    assert [sets.own(sizes) is sets.come_together for sizes in [(5, 8)]] == [False]
    assert not sets.come_together
    sets.all_are_own = True
    assert sets.own([5, 8]) == (5, 8)
