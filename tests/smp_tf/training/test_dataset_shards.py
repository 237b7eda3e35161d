"""Each replica's share of a data set: batches of known and unknown size, of all kinds of tensors, and samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import smp_tf as smp
from smp_tf.job import runtime
from smp_tf.partition.mesh import Mesh

Shares = Callable[..., list[tf.data.Dataset]]


@pytest.fixture
def shares(init: Callable[..., None]) -> Iterator[Shares]:
    """Gives the shares of all replicas, of two stages each."""
    init()
    alone = runtime.current()

    def of(dataset: Any, replicas: int, **options: Any) -> list[tf.data.Dataset]:
        found = []
        for replica in range(replicas):
            size = 2 * replicas
            topology = dataclasses.replace(alone.topology, mesh=Mesh(size, 2), rank=2 * replica + 1)
            runtime.install(dataclasses.replace(alone, topology=topology))
            found.append(smp.shard_dataset(dataset, **options))
        return found

    yield of
    runtime.install(alone)


def listed(dataset: tf.data.Dataset) -> list[Any]:
    return [np.asarray(element).tolist() for element in dataset.as_numpy_iterator()]


def samples(count: int) -> tf.data.Dataset:
    return tf.data.Dataset.range(count)


class TestBatches:
    def test_every_batch_is_cut_into_parts_whose_sizes_differ_by_at_most_one(self, shares: Shares) -> None:
        first, second, third = map(listed, shares(samples(9).batch(5), 3))
        assert first == [[0, 1], [5, 6]]
        assert second == [[2, 3], [7]]
        assert third == [[4], [8]]

    def test_a_known_batch_size_stays_known(self, shares: Shares) -> None:
        dataset = tf.data.Dataset.from_tensors({"x": tf.zeros([5, 7]), "y": tf.range(5)}).repeat(3)
        first, second = shares(dataset, 2)
        assert first.element_spec["x"].shape == (3, 7)
        assert second.element_spec["y"].shape == (2,)
        assert listed(second.map(lambda element: element["y"])) == [[3, 4]] * 3
        assert int(first.cardinality()) == 3

    def test_an_unknown_batch_size_stays_open_and_the_number_of_batches_known(self, shares: Shares) -> None:
        (first, _) = shares(samples(9).batch(4), 2)
        assert first.element_spec.shape == (None,)
        assert int(first.cardinality()) == 3

    @pytest.mark.parametrize("size", [6, 7])
    def test_all_kinds_of_tensors_and_structures(self, shares: Shares, size: int) -> None:
        ragged = tf.ragged.constant([[n] * (n % 3) for n in range(14)])
        sparse = tf.sparse.from_dense(np.eye(14, 4))
        dense = np.arange(28).reshape(14, 2)
        letters = np.array(list("abcdefghijklmn"))
        sets = tf.data.Dataset.from_tensor_slices(((dense, ragged), {"s": sparse, "t": letters}))
        for number, share in enumerate(shares(sets.batch(size), 2)):
            wanted = [n for n in range(14) if (n % size < (size + 1) // 2) == (number == 0) and n < 14 - 14 % size]
            found = list(share.take(14 // size))
            assert np.concatenate([e[0][0] for e in found]).tolist() == dense[wanted].tolist()
            assert tf.concat([e[0][1] for e in found], 0).to_list() == [[n] * (n % 3) for n in wanted]
            together = tf.concat([tf.sparse.to_dense(e[1]["s"]) for e in found], 0)
            np.testing.assert_array_equal(together, np.eye(14, 4)[wanted])
            assert b"".join(np.concatenate([e[1]["t"] for e in found])).decode() == "".join(chr(97 + n) for n in wanted)

    def test_nothing_stays_nothing(self, shares: Shares) -> None:
        dataset = samples(4).batch(4).map(lambda x: (x, None))
        [(x, nothing)] = shares(dataset, 2)[1]
        assert (x.numpy().tolist(), nothing) == ([2, 3], None)

    def test_one_replica_has_the_data_set_itself(self, shares: Shares) -> None:
        dataset = samples(3)
        assert shares(dataset, 1) == [dataset]

    def test_shuffles_are_alike_everywhere_so_the_shares_are_disjoint(self, shares: Shares) -> None:
        seen = []
        for number in range(2):
            # Each replica is a process of its own, which has made the same operations before.
            tf.random.set_seed(7)
            share = shares(samples(12).shuffle(12).batch(4), 2)[number]
            seen.append([np.concatenate(listed(share)).tolist() for _ in range(2)])
        for epoch in range(2):
            assert sorted(seen[0][epoch] + seen[1][epoch]) == list(range(12))
        assert seen[0][0] != seen[0][1]


class TestSamples:
    def test_every_replica_gets_every_other_sample_and_all_the_same_number(self, shares: Shares) -> None:
        assert list(map(listed, shares(samples(11), 3, batched=False))) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]

    def test_also_where_nobody_knows_how_many_there_are_and_of_what_shapes(self, shares: Shares) -> None:
        dataset = samples(7).filter(lambda n: n >= 0).map(lambda n: ({"a": tf.range(n)}, n))
        for number, share in enumerate(shares(dataset, 2, batched=False)):
            assert [len(a["a"]) for a, _ in share] == [int(n) for _, n in share] == [number, number + 2, number + 4]
            assert share.element_spec == dataset.element_spec
        filtered = shares(samples(7).filter(lambda n: n >= 0), 2, batched=False)[1]
        assert listed(filtered) == [1, 3, 5]

    def test_data_without_an_end(self, shares: Shares) -> None:
        assert listed(shares(samples(3).repeat(), 2, batched=False)[1].take(4)) == [1, 0, 2, 1]


class TestRefusals:
    @pytest.mark.parametrize(
        ("dataset", "kind", "said"),
        [
            (np.zeros(3), TypeError, r"takes a tf\.data\.Dataset\. Received: ndarray"),
            (samples(4), ValueError, r"its element is a scalar, so its elements are samples: call dataset\.batch"),
            (samples(4).map(lambda n: (tf.zeros([2]), n)), ValueError, "tensor 2 of 2 is a scalar"),
            (
                tf.data.Dataset.from_tensors((np.zeros(4), np.zeros([5, 4]))),
                ValueError,
                "tensor 1 of 2 has 4, tensor 2 of 2 has 5. If its elements are samples",
            ),
            (samples(4).batch(2, drop_remainder=True), ValueError, "have 2 samples, too few for 3 replicas"),
            (samples(4).window(2), TypeError, "its element is a Dataset"),
        ],
    )
    def test_what_cannot_be_cut_is_told_at_once(
        self, shares: Shares, dataset: Any, kind: type[Exception], said: str
    ) -> None:
        with pytest.raises(kind, match=said):
            shares(dataset, 3)

    def test_a_last_batch_that_is_too_small_is_told_when_it_comes(self, shares: Shares) -> None:
        share = iter(shares(samples(5).batch(4), 2)[0])
        assert next(share).numpy().tolist() == [0, 1]
        with pytest.raises(tf.errors.InvalidArgumentError, match="fewer samples than there are replicas, 2, so"):
            next(share)

    def test_tensors_of_different_sizes_are_told_when_they_come(self, shares: Shares) -> None:
        dataset = tf.data.Dataset.zip((samples(8).batch(4), samples(8).batch(3)))
        with pytest.raises(tf.errors.InvalidArgumentError, match="tensors of a batch need the same number of samples"):
            next(iter(shares(dataset, 2)[0]))
