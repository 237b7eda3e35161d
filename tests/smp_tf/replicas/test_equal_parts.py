"""Sums in equal parts: of replicas that are threads of one process, against sums in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import tensorflow as tf

from smp_tf.replicas.equal_parts import Exchange, sums_in_parts
from smp_tf.replicas.two_byte_floats import COMPRESSED
from tests.smp_tf import exchanging_threads

#: What a value can be off by, as a share of the largest one: of what is sent, and again of the sum.
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}


class Replicas(exchanging_threads.Replicas):
    """Threads that sum what they have."""

    def sums(self, kind: str | None, of: Callable[[int], Sequence[tf.Tensor]]) -> list[list[tf.Tensor]]:
        """What each replica gets, of the tensors that it has."""
        return self.run(lambda replica: sums_in_parts(of(replica), kind, self.exchange(replica)))


def drawn(replica: int, scale: float = 1.0) -> list[tf.Tensor]:
    random = np.random.default_rng(replica)
    shapes = [(7, 5), (), (11,), (0, 3)]
    return [tf.constant(scale * random.standard_normal(shape), tf.float32) for shape in shapes]


@pytest.mark.parametrize("kind", ROUNDING)
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30])
def test_sums_are_those_of_float32_but_for_rounding_and_equal_on_all(kind: str, count: int, scale: float) -> None:
    found = Replicas(count).sums(kind, lambda replica: drawn(replica, scale))
    wanted = [np.sum([drawn(r, scale)[i].numpy() for r in range(count)], axis=0) for i in range(4)]
    off = 2 * count * ROUNDING[kind] * scale * 3.0
    for tensor, one in zip(wanted, found[0], strict=True):
        assert (one.dtype, one.shape) == (tf.float32, tensor.shape)
        np.testing.assert_allclose(one, tensor, rtol=0.0, atol=off)
    for other in found[1:]:
        for one, again in zip(found[0], other, strict=True):
            assert one.numpy().tobytes() == again.numpy().tobytes()


@pytest.mark.parametrize("kind", ROUNDING)
def test_every_replica_sends_as_much_whatever_the_sizes_of_tensors(kind: str) -> None:
    replicas = Replicas(4)
    replicas.sums(kind, lambda replica: [tf.ones(10_001), tf.ones(3), tf.ones([2, 5])])
    # Of 10,014 elements in four parts, once all of them, each with a code of the sizes, and once the own one.
    part = 2504 + (kind == "fp16")
    assert replicas.bytes == [2 * (4 * (part + 1) + part)] * 4
    assert replicas.types == {tf.uint16}


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_sums_of_what_is_sent_as_it_is_are_exact(dtype: tf.DType) -> None:
    replicas = Replicas(3)
    found = replicas.sums(None, lambda replica: [tf.cast(one, dtype) for one in drawn(replica)])
    wanted = [np.sum([tf.cast(drawn(r)[i], dtype).numpy() for r in range(3)], axis=0) for i in range(4)]
    for sums in found:
        for one, total in zip(sums, wanted, strict=True):
            assert (one.dtype, one.shape) == (dtype, total.shape)
            np.testing.assert_array_equal(one, total)
    # Of 47 elements in three parts.
    assert replicas.bytes == [dtype.size * (3 * (16 + 1) + 16)] * 3
    assert replicas.types == {dtype}


@pytest.mark.parametrize("kind", ROUNDING)
def test_what_is_not_finite_is_seen_on_all_and_spares_the_others(kind: str) -> None:
    """In float16 the scale of a part came of its largest value, and that of one with an infinite one was wrong."""
    given = tf.constant([3.0, np.inf, np.nan, -7.0])
    for [zeros, odd] in Replicas(2).sums(kind, lambda replica: [tf.zeros(4), given if replica else tf.zeros(4)]):
        assert zeros.numpy().tolist() == [0.0] * 4
        np.testing.assert_array_equal(odd, [3.0, np.inf, np.nan, -7.0])
    for [zeros] in Replicas(2).sums(kind, lambda replica: [tf.zeros(5)]):
        assert zeros.numpy().tolist() == [0.0] * 5


@pytest.mark.parametrize("kind", [*ROUNDING, None])
def test_replicas_with_other_shapes_are_told(kind: str | None) -> None:
    """Of 8 and 3 and of 9 and 3 elements, parts are equally long: they were added up shifted."""
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?s)must have the same shapes on all.*[89],? 3"):
        Replicas(2).sums(kind, lambda replica: [tf.ones(8 + replica), tf.fill([3], 100.0)])


@pytest.mark.parametrize("largest", [1.0, 1.5, 1e-6, 3e8])
def test_halves_keep_what_is_much_smaller_than_the_largest(largest: float) -> None:
    [[total], _] = Replicas(2).sums("fp16", lambda replica: [tf.constant([largest, largest * 2.0**-38, 0.0, 0.0])])
    # It is among the smallest numbers that float16 has, and rounded as those are.
    assert total.numpy()[1] == pytest.approx(2.0 * largest * 2.0**-38, rel=0.5)


def test_large_sums_do_not_become_infinite_in_halves() -> None:
    """Gradients are summed with the numbers of samples as weights: beyond 65,504 there is nothing in float16."""
    [[total], _] = Replicas(2).sums("fp16", lambda replica: [tf.constant([60_000.0, 1.0])])
    np.testing.assert_allclose(total, [120_000.0, 2.0], rtol=1e-2)


@pytest.mark.parametrize("dtype", COMPRESSED)
def test_gradients_stay_of_their_type(dtype: tf.DType) -> None:
    [[total], _] = Replicas(2).sums("bf16", lambda replica: [tf.constant([1.5, 2.0], dtype)])
    assert total.dtype == dtype
    assert total.numpy().tolist() == [3.0, 4.0]


def test_shapes_may_be_known_only_when_the_step_runs() -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, 3]), tf.TensorSpec([2])])
    def sums(first: tf.Tensor, second: tf.Tensor) -> list[tf.Tensor]:
        return sums_in_parts([first, second], "bf16", Exchange(1, lambda rows: rows, lambda row: row))

    first, second = sums(tf.ones([4, 3]), tf.ones([2]))
    assert (first.shape, second.shape) == ((4, 3), (2,))
