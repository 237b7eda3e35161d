"""Averages of one bit an element: of replicas that are threads of one process, against what was to be sent."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from smp_tf.replicas.equal_parts import Exchange
from smp_tf.replicas.one_bit_sums import BLOCK, BlockFormat, Errors, average, decoded, encoded
from tests.smp_tf.exchanging_threads import Replicas

#: More than a block, a scalar, less than a block, a whole one.
SHAPES = ((3, 700), (), (11,), (BLOCK,))
SIZES = (2100, 1, 11, BLOCK)


def errors_of(form: BlockFormat) -> Errors:
    return Errors(tf.Variable(tf.zeros([form.blocks, BLOCK])), tf.Variable(tf.zeros([form.blocks_of_part, BLOCK])))


def drawn(replica: int, step: int) -> list[np.ndarray]:
    random = np.random.default_rng([replica, step])
    scales = (1.0, 1e-3, 50.0, 1e-20)
    return [np.float32(scale * random.standard_normal(shape)) for scale, shape in zip(scales, SHAPES, strict=True)]


def test_tensors_begin_with_a_block_and_blocks_are_divided_by_replicas() -> None:
    form = BlockFormat(SIZES, replicas=4)
    assert form.elements().tolist() == [1024, 1024, 52, 1, 11, 1024, 0, 0]
    assert (form.blocks, form.blocks_of_part) == (8, 2)
    assert BlockFormat((0, 5), replicas=1).elements().tolist() == [5]


def test_signs_and_scales_come_back_exactly() -> None:
    random = np.random.default_rng(1)
    blocks = np.float32(random.standard_normal((3, BLOCK)))
    blocks[2, 5:] = 0.0
    elements = np.array([BLOCK, BLOCK, 5], np.int32)
    rows = encoded(tf.constant(blocks), tf.constant(elements))
    assert (rows.dtype, rows.shape) == (tf.uint8, (3, 4 + BLOCK // 8))
    found = decoded(rows).numpy()
    for block, again, count in zip(blocks, found, elements, strict=True):
        # Whatever lies behind its elements does not change the scale of a block.
        scale = np.abs(block[:count]).mean()
        np.testing.assert_allclose(np.abs(again), scale, rtol=1e-5)
        np.testing.assert_array_equal(np.sign(again), np.where(block > 0, 1.0, -1.0))


def test_the_first_element_is_the_highest_bit() -> None:
    block = -np.ones([1, BLOCK], np.float32)
    block[0, 0] = block[0, 15] = 1.0
    rows = encoded(tf.constant(block), tf.constant([BLOCK])).numpy()
    assert rows[0, 4:7].tolist() == [0b10000000, 0b00000001, 0]
    assert rows[0, :4].tobytes() == np.float32(1.0).tobytes()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_was_sent_and_the_last_error_add_up_to_what_there_was_to_send(count: int) -> None:
    """Of the workers their own, and over all steps the averages and what the servers have left."""
    form, steps = BlockFormat(SIZES, count), 20
    errors = [errors_of(form) for _ in range(count)]
    replicas = Replicas(count)

    def run(replica: int) -> list[list[np.ndarray]]:
        found = []
        for step in range(steps):
            given = [tf.constant(value) for value in drawn(replica, step)]
            averages = average(given, form, errors[replica], replicas.exchange(replica), replica)
            assert [(a.dtype, a.shape) for a in averages] == [(tf.float32, shape) for shape in SHAPES]
            found.append([a.numpy() for a in averages])
        return found

    found = replicas.run(run)
    for of_replica in found[1:]:
        for step in range(steps):
            for one, again in zip(found[0][step], of_replica[step], strict=True):
                assert one.tobytes() == again.tobytes()
    left = np.mean([e.worker.numpy() for e in errors], axis=0) + np.concatenate([e.server.numpy() for e in errors])
    begin = 0
    for i, size in enumerate(SIZES):
        blocks = -(-size // BLOCK)
        rest = left[begin : begin + blocks].ravel()
        begin += blocks
        wanted = np.sum([np.mean([drawn(r, s)[i] for r in range(count)], axis=0) for s in range(steps)], axis=0)
        sent = np.sum([averages[i] for averages in found[0]], axis=0)
        largest = np.abs(wanted).max() + np.abs(sent).max()
        np.testing.assert_allclose(sent.ravel() + rest[:size], wanted.ravel(), rtol=0, atol=1e-5 * largest)
        # Behind the elements nothing gathers.
        assert not rest[size:].any()
    assert not left[begin:].any()


def test_a_block_has_a_scale_of_its_own_tensor_alone() -> None:
    form = BlockFormat((3, 5), 1)
    exchange = Replicas(1).exchange(0)
    small, large = average([tf.fill([3], 1e-6), tf.fill([5], 1e6)], form, errors_of(form), exchange, 0)
    np.testing.assert_allclose(small, [1e-6] * 3, rtol=1e-6)
    np.testing.assert_allclose(large, [1e6] * 5, rtol=1e-6)


def test_an_element_is_sent_in_little_more_than_a_bit() -> None:
    form, replicas = BlockFormat((16 * BLOCK,), 2), Replicas(2)
    errors = [errors_of(form) for _ in range(2)]
    replicas.run(lambda r: average([tf.ones([16 * BLOCK])], form, errors[r], replicas.exchange(r), r))
    # All of it once, with two bytes for every replica, and of the averages a half.
    assert replicas.bytes == [16 * 132 + 4 + 8 * 132] * 2
    assert replicas.types == {tf.uint8}


def test_what_is_not_finite_is_seen_on_all() -> None:
    form, replicas = BlockFormat((4, 4), 2), Replicas(2)
    errors = [errors_of(form) for _ in range(2)]
    odd, fine = tf.constant([1.0, np.inf, 2.0, 3.0]), tf.ones([4])
    for found in replicas.run(lambda r: average([odd if r else fine, fine], form, errors[r], replicas.exchange(r), r)):
        assert not np.isfinite(found[0]).any()
        assert found[1].numpy().tolist() == [1.0] * 4


def test_replicas_with_other_sizes_are_told() -> None:
    """Both have two blocks."""
    replicas = Replicas(2)

    def run(replica: int) -> None:
        form = BlockFormat((8 + replica, 3), 2)
        given = [tf.ones([8 + replica]), tf.ones([3])]
        average(given, form, errors_of(form), replicas.exchange(replica), replica)

    with pytest.raises(tf.errors.InvalidArgumentError, match="must have the same shapes on all"):
        replicas.run(run)


def test_it_works_in_a_graph_and_in_a_branch_of_one() -> None:
    form = BlockFormat((5,), 1)
    errors = errors_of(form)
    # One that needs no eager values.
    exchange = Exchange(1, lambda rows: rows, lambda row: row)
    given = tf.constant([1.0, -3.0, 2.0, 0.5, -0.5])

    @tf.function
    def once(is_due: tf.Tensor) -> tf.Tensor:
        due = lambda: average([given], form, errors, exchange, 0)[0]  # noqa: E731
        return tf.cond(is_due, due, lambda: tf.zeros([5]))

    assert once(tf.constant(False)).numpy().tolist() == [0.0] * 5
    first = once(tf.constant(True)).numpy()
    np.testing.assert_allclose(first, [1.4, -1.4, 1.4, 1.4, -1.4], rtol=1e-6)
    np.testing.assert_allclose(errors.worker[0, :6], [-0.4, -1.6, 0.6, -0.9, 0.9, 0.0], rtol=1e-5)
