"""Sequences are shuffled by a seed, whatever else draws random numbers, and how far Keras's threads have come."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tf_keras
from tf_keras.src.utils import data_utils

import smp_tf as smp
from smp_tf.training.shuffling import shuffled_alike

pytestmark = pytest.mark.large


class Numbers(tf_keras.utils.Sequence):
    """Batches of one number."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return index


class Rows(Numbers):
    """Batches of one row, as `fit` wants them."""

    def __getitem__(self, index: int) -> Any:
        return np.array([[index]]), np.array([[0.0]])


def shuffled(seed: int, x: Any = None, **given: Any) -> Any:
    random.seed(seed)
    return shuffled_alike({"x": Numbers() if x is None else x, "workers": 2, "use_multiprocessing": False, **given})


def orders(epochs: int, disturbance: int) -> list[list[int]]:
    """What `fit` is given in every epoch, by one enqueuer an epoch, as Keras makes them."""
    found = []
    for _ in range(epochs):
        random.seed(disturbance)
        enqueuer = data_utils.OrderedEnqueuer(Numbers(), shuffle=True)
        enqueuer.start(workers=2)
        batches = enqueuer.get()
        # Now and then it begins anew before it is stopped.
        found.append([next(batches) for _ in range(6 + disturbance)][:6])
        enqueuer.stop()
    return found


def test_the_order_follows_from_pythons_seed_alone(init: Callable[..., None]) -> None:
    init()
    with shuffled(7):
        first = orders(2, disturbance=0)
    with shuffled(7):
        again = orders(2, disturbance=3)
    with shuffled(8):
        other = orders(2, disturbance=0)
    assert first == again
    assert first != other
    assert first[0] != first[1]
    assert sorted(first[0]) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "given", [{"workers": 1}, {"workers": 0, "use_multiprocessing": True}, {"x": np.zeros([4, 1])}]
)
def test_without_workers_or_a_sequence_the_generator_is_as_before(
    init: Callable[..., None], given: dict[str, Any]
) -> None:
    init()
    with shuffled(7, **given):
        state = random.getstate()
    random.seed(7)
    assert state == random.getstate()


def test_one_process_that_fits_with_workers_has_the_order_of_all_ranks(init: Callable[..., None]) -> None:
    init(microbatches=1)
    seen: list[float] = []
    model = smp.DistributedModel(tf_keras.Sequential([tf_keras.layers.Dense(1, kernel_initializer="ones")]))
    model.compile(tf_keras.optimizers.SGD(0.0), "mse")
    note = tf_keras.callbacks.LambdaCallback(on_batch_end=lambda batch, logs: seen.append(logs["loss"]))
    random.seed(7)
    model.fit(Rows(), workers=2, verbose=0, callbacks=[note])
    random.seed(7)
    order = list(range(6))
    random.Random(f"{random.getrandbits(32)}/0").shuffle(order)
    means = [sum(index**2 for index in order[: n + 1]) / (n + 1) for n in range(6)]
    np.testing.assert_allclose(seen, means, rtol=1e-6)
