"""Sums that one replica each receives, or rows of them: of replicas that are threads, against sums in float32."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf

from smp_tf.partition.spread import SplitOver, Whole
from smp_tf.replicas import reduce_scatter as module
from smp_tf.replicas.reduce_scatter import Receiver, Route, sums_at_receivers

SHAPES = [(7, 5), (), (11,), (0, 3), (4, 4)]
#: What a value can be off by, as a share of the largest one that is sent.
ROUNDING = {None: 1e-6, "bf16": 2.0**-8, "fp16": 2.0**-11}


class Replicas:
    """Threads that send each other parts of vectors, and the bytes that each gives."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._barrier = threading.Barrier(count, timeout=60.0)
        self._parts: list[list[tf.Tensor]] = [[] for _ in range(count)]
        #: By replica, of each round.
        self.bytes: list[list[int]] = [[] for _ in range(count)]

    def _alltoall(self, replica: int, vector: tf.Tensor, splits: tf.Tensor, number: int) -> tf.Tensor:
        assert splits.dtype == tf.int32
        assert number == len(self.bytes[replica])
        self.bytes[replica].append(int(tf.size(vector)) * vector.dtype.size)
        self._parts[replica] = tf.split(vector, splits.numpy().tolist())
        self._barrier.wait()
        found = tf.concat([of[replica] for of in self._parts], axis=0)
        self._barrier.wait()
        return found

    def sums(
        self, kind: str | None, receivers: Sequence[Receiver], dtype: tf.DType = tf.float32
    ) -> list[list[tf.Tensor]]:
        """What each replica gets."""

        def of(replica: int) -> list[tf.Tensor]:
            route = Route(self._count, replica, lambda *given: self._alltoall(replica, *given))
            tensors = [tf.cast(tensor, dtype) for tensor in drawn(replica)]
            return sums_at_receivers(tensors, receivers, kind, route)[0]

        with ThreadPoolExecutor(self._count) as threads:
            return list(threads.map(of, range(self._count)))


def drawn(replica: int) -> list[tf.Tensor]:
    random = np.random.default_rng(replica)
    return [tf.constant(random.standard_normal(shape), tf.float32) for shape in SHAPES]


def to_one(replica: int, elements: int, replicas: int = 3) -> Receiver:
    """One replica gets the sum."""
    return Receiver(Whole("D", replica, replicas), elements)


def in_rows(borders: tuple[int, ...], width: int) -> Receiver:
    """Each replica gets rows of so many elements."""
    return Receiver(SplitOver("D", 0, borders), borders[-1] * width)


def rows_of(receiver: Receiver, replica: int) -> tuple[int, int]:
    rows = receiver.spread.rows_at({"D": replica})
    assert rows is not None
    return rows


def whole(replicas: Sequence[int], shapes: Sequence[Sequence[int]] = SHAPES) -> list[Receiver]:
    return [to_one(replica, int(np.prod(shape))) for replica, shape in zip(replicas, shapes, strict=False)]


@pytest.mark.parametrize("kind", ROUNDING)
@pytest.mark.parametrize(
    ("count", "receivers"), [(2, [0, 1, 1, 0, 0]), (3, [2, 0, 0, 2, 1]), (3, [1, 1, 1, 1, 1]), (2, [1, 1, 1, 0, 1])]
)
def test_each_replica_gets_the_sums_that_it_receives(kind: str | None, count: int, receivers: list[int]) -> None:
    found = Replicas(count).sums(kind, whole(receivers))
    wanted = [np.sum([drawn(r)[i].numpy() for r in range(count)], axis=0) for i in range(len(SHAPES))]
    for replica, got in enumerate(found):
        expected = [total for total, receiver in zip(wanted, receivers, strict=True) if receiver == replica]
        for one, total in zip(got, expected, strict=True):
            assert (one.dtype, one.shape) == (tf.float32, total.shape)
            np.testing.assert_allclose(one, total, rtol=0.0, atol=count * ROUNDING[kind] * 4.0)


def test_halves_are_added_up_in_float32() -> None:
    # Of 2,049 float16 knows 2,048.
    found = Replicas(3).sums("fp16", whole([0] * 5), tf.float16)[0]
    exact = np.sum([drawn(r)[0].numpy().astype(np.float16).astype(np.float32) for r in range(3)], axis=0)
    assert found[0].dtype == tf.float16
    np.testing.assert_array_equal(found[0], exact.astype(np.float16))


@pytest.mark.parametrize(("kind", "bytes_each", "scales"), [(None, 4, 0), ("bf16", 2, 0), ("fp16", 2, 1)])
def test_every_element_is_given_once(kind: str | None, bytes_each: int, scales: int) -> None:
    replicas = Replicas(2)
    replicas.sums(kind, whole([0, 1, 1, 0, 0]))
    elements = sum(int(np.prod(shape)) for shape in SHAPES)
    assert replicas.bytes == [[bytes_each * (elements + 2 * scales)]] * 2


#: Of the first and the last tensor of `SHAPES`; of the last one the first replica gets nothing.
FIRST, LAST = in_rows((0, 2, 3, 7), 5), in_rows((0, 0, 1, 4), 4)


@pytest.mark.parametrize("kind", ROUNDING)
@pytest.mark.parametrize(("limit", "rounds"), [(1 << 20, 1), (50, 3)])
def test_each_replica_gets_its_rows(monkeypatch: pytest.MonkeyPatch, kind: str | None, limit: int, rounds: int) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", limit)
    replicas = Replicas(3)
    found = replicas.sums(kind, [FIRST, *whole([1, 0, 2], SHAPES[1:]), LAST])
    wanted = [np.sum([drawn(r)[i].numpy() for r in range(3)], axis=0) for i in range(len(SHAPES))]
    for replica, got in enumerate(found):
        (start, stop), (begin, end) = rows_of(FIRST, replica), rows_of(LAST, replica)
        of_it = [wanted[i] for i, receiver in enumerate([None, 1, 0, 2]) if receiver == replica]
        expected = [wanted[0][start:stop], *of_it, wanted[4][begin:end]]
        for one, total in zip(got, expected, strict=True):
            assert (one.dtype, one.shape) == (tf.float32, total.shape)
            np.testing.assert_allclose(one, total, rtol=0.0, atol=3 * ROUNDING[kind] * 4.0)
    assert [len(sent) for sent in replicas.bytes] == [rounds] * 3
    if kind is None:
        elements = sum(int(np.prod(shape)) for shape in SHAPES)
        assert [sum(sent) for sent in replicas.bytes] == [4 * elements] * 3


def test_a_large_gradient_is_sent_in_rounds_of_equal_parts() -> None:
    # 160 MB, of which no more than 25 MiB may be sent at once.
    rows = in_rows((0, 12_000, 25_000, 40_000), 1_000)
    assert rows.rounds(4) == 7
    parts = [[rows.part(replica, number, 7) for number in range(7)] for replica in range(3)]
    assert parts[0][:2] == [(0, 1714), (1714, 3428)]
    for replica, of_it in enumerate(parts):
        assert (of_it[0][0], of_it[-1][1]) == rows_of(rows, replica)
        assert all(before[1] == after[0] for before, after in itertools.pairwise(of_it))
    sent = [sum(stop - start for start, stop in (of[number] for of in parts)) * 4_000 for number in range(7)]
    assert max(sent) <= 1.001 * (25 << 20)


def test_large_rows_are_sent_in_as_many_rounds_as_there_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 13 rounds by bytes some had nothing to send for any replica, and a step could not be traced."""
    monkeypatch.setattr(module, "MOST_BYTES", 11)
    replicas = Replicas(2)
    rows = in_rows((0, 3, 7), 5)
    assert rows.rounds(4) == 4
    found = replicas.sums(None, [rows, *whole([1, 0, 1, 0], SHAPES[1:])])
    wanted = drawn(0)[0].numpy() + drawn(1)[0].numpy()
    for got, (start, stop) in zip(found, (rows_of(rows, 0), rows_of(rows, 1)), strict=True):
        np.testing.assert_allclose(got[0], wanted[start:stop], rtol=1e-6)
    assert [len(sent) for sent in replicas.bytes] == [4, 4]
