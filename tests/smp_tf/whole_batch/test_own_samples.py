"""A replica finds the samples of its own batch among those of all replicas."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from smp_tf.whole_batch import own_samples
from smp_tf.whole_batch.own_samples import OwnSamples, gathered_samples


def test_samples_of_a_replica_come_after_those_of_the_replicas_before() -> None:
    own = OwnSamples([5, 3, 4], replica=1, microbatches=2)
    assert (own.total, own.begin, own.count, own.parts) == (12, 5, 3, (2, 1))
    np.testing.assert_array_equal(own.rows_of(np.arange(12)), [5, 6, 7])
    # Two rows for each sample.
    np.testing.assert_array_equal(own.rows_of(np.arange(24)), range(10, 16))


def test_a_batch_has_no_more_microbatches_than_samples() -> None:
    assert OwnSamples([5, 1], replica=1, microbatches=4).parts == (1,)


def test_sizes_may_be_known_only_when_the_batch_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    here = SimpleNamespace(topology=SimpleNamespace(replica=1))
    monkeypatch.setattr(own_samples, "runtime", SimpleNamespace(current=lambda: here))
    # The first replica has two samples more.
    more = [[2, 0]]
    monkeypatch.setattr(own_samples, "join_rows", lambda rows, *_: [tf.concat([rows[0][0] + more, rows[0][0]], 0)])
    own = gathered_samples(3)
    assert (int(own.total), int(own.begin), own.count) == (8, 5, 3)
    np.testing.assert_array_equal(own.rows_of(tf.range(8)), [5, 6, 7])

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def rows_of(value: tf.Tensor) -> tf.Tensor:
        rows = gathered_samples(3).rows_of(value)
        assert rows.shape == (3, 2)
        return rows

    np.testing.assert_array_equal(rows_of(tf.reshape(tf.range(16.0), [8, 2])), [[10, 11], [12, 13], [14, 15]])
    with pytest.raises(tf.errors.InvalidArgumentError, match="add up to as many samples as in the first step"):
        gathered_samples(3, only=9, step="Step 'train'")
    assert int(gathered_samples(3, only=8).total) == 8
    more[0][1] = 1
    with pytest.raises(tf.errors.InvalidArgumentError, match="batches of one size"):
        gathered_samples(3, only=8)
