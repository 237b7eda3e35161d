"""Averages over replicas by sending one bit per element, and keeps what this loses for the next time.

    replica 0   a0 │ a1   + error    alltoall     mean of a0, b0   + error    allgather     m0 │ m1
    replica 1   b0 │ b1   + error  ───────────▶   mean of a1, b1   + error  ────────────▶   m0 │ m1
                signs, a scale a block             signs, a scale a block

For every block of elements, the signs are sent, and the mean of the absolute values. The part of its values that a
replica did not send is its error. It adds the error the next time. The replica that averages a part does the same for
the averages that it sends. So what was sent in all steps, and the last error, add up to what there was to send. All
replicas decode the same bytes of each part, so they stay equal to the last bit.

Source: Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", ICML
2021, Algorithm 1, lines 5 to 8; Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
Distributed Training of Speech DNNs", Interspeech 2014, section 2 (the error).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from smp_tf.replicas.equal_parts import Exchange, code_of, require_alike

#: How many elements share a scale. A block never has elements of two tensors, since their sizes may differ much.
BLOCK = 1024
#: Bytes of a scale, and of a block as it is sent.
_SCALE = 4
_ROW = _SCALE + BLOCK // 8
#: Bytes of the code of sizes.
_CODE = 2
#: The values of the bits of a byte. The first element is the highest bit.
_PLACES = 2.0 ** np.arange(7, -1, -1, dtype=np.float32)[:, None]
#: The signs that a byte stands for.
_SIGNS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1), 1.0, -1.0).astype(np.float32)


@dataclass(frozen=True)
class BlockFormat:
    """How tensors lie in blocks. Each begins with a new block, and the number of replicas divides that of blocks.

    Args:
        sizes: elements of each tensor.
        replicas: number of replicas.
    """

    sizes: tuple[int, ...]
    replicas: int

    @property
    def blocks(self) -> int:
        """Returns the number of blocks of all tensors, with those that make it divisible."""
        used = sum(_blocks_of(size) for size in self.sizes)
        return used + -used % self.replicas

    @property
    def blocks_of_part(self) -> int:
        """Returns the number of blocks that one replica averages."""
        return self.blocks // self.replicas

    def elements(self) -> np.ndarray:
        """Returns how many elements of each block are a tensor's, int32[blocks]. Only last blocks may have fewer."""
        found = []
        for size in self.sizes:
            found += [BLOCK] * (size // BLOCK) + [size % BLOCK] * (size % BLOCK > 0)
        return np.array(found + [0] * (self.blocks - len(found)), np.int32)


@dataclass(frozen=True)
class Errors:
    """What was not sent yet, in variables. They begin with zeros, and every average changes them.

    Args:
        worker: errors of what this replica sends, float32[blocks, BLOCK].
        server: errors of the part that it averages, float32[blocks of a part, BLOCK].
    """

    worker: tf.Variable
    server: tf.Variable


def average(
    tensors: Sequence[tf.Tensor], form: BlockFormat, errors: Errors, exchange: Exchange, replica: int
) -> list[tf.Tensor]:
    """Returns the averages over the replicas of tensors that all of them have, sent with one bit per element.

    Args:
        tensors: tensors of floats, with the sizes of the form, and equal in number and shapes on every replica.
        form: how the tensors lie in blocks.
        errors: errors of this replica.
        exchange: how the parts travel, as uint8.
        replica: number of this replica.

    Returns:
        The averages, float32, of the same shapes, and equal to the last bit on all replicas. They are an error of
        TensorFlow where the tensors of another replica are known to have other sizes.
    """
    elements = tf.constant(form.elements())
    part = form.blocks_of_part
    rows = _sent(_in_blocks(tensors, form) + errors.worker.read_value(), elements, errors.worker)
    # Otherwise, shifted parts would be averaged silently.
    sizes = tf.constant(form.sizes, tf.int32)
    code = tf.bitcast(tf.cast(code_of(sizes), tf.uint16), tf.uint8)
    sent = tf.concat([tf.reshape(rows, [form.replicas, -1]), tf.tile(code[None], [form.replicas, 1])], axis=1)
    received = exchange.alltoall(sent)
    with tf.control_dependencies(require_alike(tf.reduce_all(tf.equal(received[:, -_CODE:], code)), sizes)):
        parts = tf.reshape(decoded(tf.reshape(received[:, :-_CODE], [-1, _ROW])), [form.replicas, part, BLOCK])
    own_elements = elements[replica * part : (replica + 1) * part]
    # What is no element was received with a sign, too.
    mean = _elements_only(tf.reduce_mean(parts, axis=0), own_elements)
    own_rows = _sent(mean + errors.server.read_value(), own_elements, errors.server)
    gathered = exchange.allgather(tf.reshape(own_rows, [1, -1]))
    return _out_of_blocks(decoded(tf.reshape(gathered, [-1, _ROW])), tensors, form)


def encoded(blocks: tf.Tensor, elements: tf.Tensor) -> tf.Tensor:
    """Returns the blocks in the form in which they are sent.

    Args:
        blocks: float32[n, BLOCK], with zeros in place of missing elements.
        elements: how many of each block are elements, int32[n].

    Returns:
        For each block its scale and its signs, uint8[n, bytes of both]. Zeros count as negative.
    """
    counts = tf.cast(tf.maximum(elements, 1), tf.float32)
    scales = tf.reduce_sum(tf.abs(blocks), axis=1) / counts
    # The fastest way to combine bits is a product of matrices of whole numbers up to 255.
    bits = tf.reshape(tf.cast(blocks > 0, tf.float32), [-1, 8])
    signs = tf.cast(tf.reshape(tf.matmul(bits, tf.constant(_PLACES)), [-1, BLOCK // 8]), tf.uint8)
    return tf.concat([tf.bitcast(scales, tf.uint8), signs], axis=1)


def decoded(rows: tf.Tensor) -> tf.Tensor:
    """Returns the blocks that `encoded` has encoded: plus or minus the scale for each element, float32[n, BLOCK]."""
    scales = tf.bitcast(rows[:, :_SCALE], tf.float32)
    signs = tf.reshape(tf.gather(tf.constant(_SIGNS), tf.cast(rows[:, _SCALE:], tf.int32)), [-1, BLOCK])
    return signs * scales[:, None]


def _sent(blocks: tf.Tensor, elements: tf.Tensor, error: tf.Variable) -> tf.Tensor:
    """Returns the blocks in the form in which they are sent. What they lose by this is the new error."""
    rows = encoded(blocks, elements)
    error.assign(_elements_only(blocks - decoded(rows), elements), read_value=False)
    return rows


def _elements_only(blocks: tf.Tensor, elements: tf.Tensor) -> tf.Tensor:
    """Returns the blocks with zeros for what is no element."""
    return tf.where(tf.sequence_mask(elements, BLOCK), blocks, 0.0)


def _in_blocks(tensors: Sequence[tf.Tensor], form: BlockFormat) -> tf.Tensor:
    """Returns the tensors as blocks, one after the other, float32[blocks, BLOCK]."""
    parts, filled = [], 0
    for tensor, size in zip(tensors, form.sizes, strict=True):
        used = BLOCK * _blocks_of(size)
        parts += [tf.reshape(tf.cast(tensor, tf.float32), [-1]), tf.zeros([used - size])]
        filled += used
    parts.append(tf.zeros([BLOCK * form.blocks - filled]))
    return tf.reshape(tf.concat(parts, axis=0), [form.blocks, BLOCK])


def _out_of_blocks(blocks: tf.Tensor, like: Sequence[tf.Tensor], form: BlockFormat) -> list[tf.Tensor]:
    found, begin = [], 0
    for tensor, size in zip(like, form.sizes, strict=True):
        rows = blocks[begin : begin + _blocks_of(size)]
        found.append(tf.reshape(tf.reshape(rows, [-1])[:size], tensor.shape))
        begin += _blocks_of(size)
    return found


def _blocks_of(size: int) -> int:
    return -(-size // BLOCK)
