"""A replica finds the samples of its own batch among those of all replicas."""

from __future__ import annotations

import numpy as np

from smp_tf.whole_batch.own_samples import OwnSamples


def test_samples_of_a_replica_come_after_those_of_the_replicas_before() -> None:
    own = OwnSamples([5, 3, 4], replica=1, microbatches=2)
    assert (own.total, own.begin, own.count, own.parts) == (12, 5, 3, (2, 1))
    np.testing.assert_array_equal(own.rows_of(np.arange(12)), [5, 6, 7])
    # Two rows for each sample.
    np.testing.assert_array_equal(own.rows_of(np.arange(24)), range(10, 16))


def test_a_batch_has_no_more_microbatches_than_samples() -> None:
    assert OwnSamples([5, 1], replica=1, microbatches=4).parts == (1,)
