"""Makes `fit` go through a `tf_keras.utils.Sequence` in the same order on all ranks of a replica.

Keras shuffles with Python's global generator once per epoch. Ranks whose generators are equal when `fit` begins go on
alike, as one process does. With workers, Keras shuffles in a thread, which may begin the next epoch or be stopped
before. How often it draws depends on timing, so ranks would soon be given different batches.

    fit ─▶ seed ─┬─ epoch 1: a generator of its own ─▶ 3 0 2 1, and what its thread draws too many stays with it
                 └─ epoch 2: a generator of its own ─▶ 1 2 0 3
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from smp_tf.job import exchange, runtime
from smp_tf.keras import adapter
from smp_tf.partition.mesh import CommGroup


@contextlib.contextmanager
def shuffled_alike(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Makes `fit` go through a sequence in one order on all ranks of a replica, within its context.

    Args:
        arguments: arguments of `fit`, by name, with the defaults of those that were not given.

    Raises:
        RankMismatchError: a rank of the replica does not call this.
    """
    if not adapter.loops().is_sequence(arguments["x"]):
        yield
        return
    version, numbers, following = _of_the_first_rank(random.getstate())
    random.setstate((version, tuple(numbers), following))
    workers = arguments["workers"]
    if not (workers > 1 or (workers > 0 and arguments["use_multiprocessing"])):
        yield
        return
    seed = random.getrandbits(32)
    # One enqueuer follows the other, each with one thread that shuffles.
    enqueuers, of_thread = itertools.count(), threading.local()

    def shuffle(order: list[Any]) -> None:
        if not hasattr(of_thread, "generator"):
            of_thread.generator = random.Random(f"{seed}/{next(enqueuers)}")
        of_thread.generator.shuffle(order)

    with adapter.loops().workers_shuffle_with(shuffle):
        yield


def _of_the_first_rank(value: Any) -> Any:
    """Returns the value of the first rank of this replica."""
    first = runtime.current().topology.members(CommGroup.PP_GROUP)[0]
    return exchange.broadcast_json(value, first, CommGroup.PP_GROUP, name="the order of a Sequence")
