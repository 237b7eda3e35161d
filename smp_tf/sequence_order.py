"""The order in which `fit` goes through a `tf_keras.utils.Sequence`: shuffled alike on all ranks of a replica.

Keras shuffles with Python's global generator, and with several workers in a thread that may begin the next epoch or be
stopped before: how often it draws is a matter of time, so ranks would soon be given other batches.

    fit ─▶ seed ─┬─ epoch 1: a generator of its own ─▶ 3 0 2 1, and what its thread draws too many stays with it
                 └─ epoch 2: a generator of its own ─▶ 1 2 0 3
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Iterator
from typing import Any

from smp_tf import tf_internals


@contextlib.contextmanager
def shuffled_by(seed: int) -> Iterator[None]:
    """Within this context the order of sequences follows from a seed alone.

    Args:
        seed: the same on all ranks that need the same order.
    """
    # One enqueuer, with one thread that shuffles, follows the other; without workers there is no such thread.
    numbers, of_thread, alone = itertools.count(), threading.local(), random.Random(seed)

    def in_thread(order: list[Any]) -> None:
        if not hasattr(of_thread, "generator"):
            of_thread.generator = random.Random(f"{seed}/{next(numbers)}")
        of_thread.generator.shuffle(order)

    with tf_internals.sequences_shuffled_with(in_thread, alone.shuffle):
        yield
