"""Measures what messages between two ranks of a host take of a processor, at each of their ends.

    rank 0   send ─────────▶ recv ─────────▶ send ...      a step of many messages, one after the other
    rank 1         recv ─▶ send      recv ─▶ send          the seconds of all threads of the process, over both ends

On one host a processor of each rank copies a message. So a message takes from the time of both stages, and not only
from the time between them. Two sizes tell what each message takes, and each byte.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from smp_tf.ops.send_recv import begin_step, end_step, recv, send

#: Elements of the tensors of both sizes, which have four bytes each.
_SMALL, _LARGE = 1 << 10, 1 << 18
#: How many messages go there and back in a step, and of how many steps the median is taken.
_MESSAGES, _STEPS = 16, 7
_BYTES = 4
#: The least seconds that a byte takes, should the measurement find none.
_LEAST = 1e-13


def seconds_of_messages(rank: int, peer: int, program: int) -> tuple[float, float]:
    """Measures messages between this rank and another one, which calls it at the same time.

    Args:
        rank: this process's world rank.
        peer: the other rank's, on the same host.
        program: a number that no other program of the two ranks has.

    Returns:
        The processor's seconds at each end, for every message and for every byte.
    """
    nothing = _seconds(_exchange(rank, peer, program, _SMALL, 0))
    small, large = (
        max(0.0, _seconds(_exchange(rank, peer, program, elements, _MESSAGES)) - nothing) / (2 * _MESSAGES)
        for elements in (_SMALL, _LARGE)
    )
    return line_through(small, large)


def line_through(small: float, large: float) -> tuple[float, float]:
    """Returns the seconds for every message and for every byte, by those of messages of both sizes.

    Args:
        small: seconds of a message of the smaller size.
        large: seconds of one of the larger size.

    Example:
        >>> message, byte = line_through(20e-6 + 4096 * 1e-10, 20e-6 + 2**20 * 1e-10)
        >>> round(1e6 * message, 3), round(1e10 * byte, 3)
        (20.0, 1.0)
    """
    byte = max(_LEAST, (large - small) / (_BYTES * (_LARGE - _SMALL)))
    return max(0.0, small - byte * _BYTES * _SMALL), byte


def _exchange(rank: int, peer: int, program: int, elements: int, messages: int) -> Callable[[], Any]:
    """Returns a function that sends tensors there and back, one after the other."""

    def step_of(value: tf.Tensor) -> tf.Tensor:
        step = begin_step([], program)
        sent: list[Any] = []
        for number in range(messages):
            where: dict[str, Any] = {"program": program, "microbatch": number, "label": "a measured message"}
            if rank < peer:
                sent.append(send(value, step, dest=peer, edge=0, **where))
            value = recv(step, value.dtype, value.shape, src=peer, edge=int(rank < peer), **where)
            if rank > peer:
                sent.append(send(value, step, dest=peer, edge=1, **where))
        with tf.control_dependencies([*sent, value]):
            end_step(program)
            return value[-1]

    function = tf.function(step_of, autograph=False, input_signature=[tf.TensorSpec([elements], tf.float32)])
    zeros = tf.zeros([elements])
    return lambda: function(zeros)


def _seconds(call: Callable[[], Any]) -> float:
    """Returns the seconds of all threads of this process that a call takes, as a median."""
    taken = []
    for _ in range(1 + _STEPS):
        began = time.process_time()
        call()
        taken.append(time.process_time() - began)
    # The first call also traces.
    return statistics.median(taken[1:])
