"""Weights that their owners tell to all: each rank gets what `variable.numpy()` gives where they are stored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from smp_tf.errors import RankMismatchError
from smp_tf.job import runtime
from smp_tf.variables import fetch, weight_reads
from tests.smp_tf.rank_threads import Ranks


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Two partitions, of which the first stores all variables."""
    found = Ranks(monkeypatch, 2, 2)
    monkeypatch.setattr(runtime, "current", found.current)
    monkeypatch.setattr(weight_reads, "_stage_of", lambda variable: 0)
    return found


@pytest.mark.parametrize(
    "value",
    [2.5, [1.0, 2.0], 7, True, "text", ["a", "of more letters"], np.zeros([0, 2], np.float32)],
    ids=str,
)
def test_every_rank_gets_the_same_kind_of_value(value: Any, ranks: Ranks) -> None:
    """Bug: a scalar was an array on ranks that do not store it, and text could not be told."""
    variable = tf.Variable(value)
    own = variable.numpy()
    for [found] in ranks.run(lambda rank: weight_reads.values([variable])):
        assert type(found) is type(own)
        np.testing.assert_array_equal(found, own)
        if isinstance(own, np.ndarray):
            assert found.flags.writeable
            assert (found.dtype, found.shape) == (own.dtype, own.shape)


def test_who_reads_alone_is_told_which_callbacks_run_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def differing(*_: Any, **__: Any) -> None:
        raise RankMismatchError("Rank 1 is at the callbacks.")

    monkeypatch.setattr(fetch, "barrier", differing)
    monkeypatch.setattr(weight_reads, "_stage_of", lambda variable: 0)
    topology: Any = SimpleNamespace(members=lambda group: (0, 1))
    monkeypatch.setattr(runtime, "current", lambda: SimpleNamespace(topology=topology))
    words = r"Rank 1 is at the callbacks\. Every rank must read it\. Under fit, a callback .* TensorBoard"
    with pytest.raises(RankMismatchError, match=words):
        weight_reads.values([tf.Variable(1.0)])
