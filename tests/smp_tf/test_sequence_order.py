"""Sequences are shuffled by a seed, whatever else draws random numbers, and how far Keras's threads have come."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import tf_keras
from tf_keras.src.utils import data_utils

from smp_tf.sequence_order import shuffled_by


class Numbers(tf_keras.utils.Sequence):
    """Batches of one number."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return index


#: Two epochs as `random.Random(7)` shuffles them.
EXPECTED = [4, 0, 5, 3, 1, 2, 2, 3, 1, 5, 4, 0]


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


def test_the_order_is_that_of_the_seed() -> None:
    with shuffled_by(7):
        first = orders(2, disturbance=0)
    with shuffled_by(7):
        again = orders(2, disturbance=3)
    with shuffled_by(8):
        other = orders(2, disturbance=0)
    assert first == again
    assert first != other
    assert first[0] != first[1]
    assert sorted(first[0]) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("disturbance", [0, 3])
def test_without_workers_too(disturbance: int) -> None:
    seen: list[int] = []

    class Net(tf_keras.Sequential):
        def make_train_function(self, force: bool = False) -> Any:
            self.train_function = lambda iterator: seen.append(int(next(iterator)[0][0, 0])) or {"loss": 0.0}
            return self.train_function

    class Rows(Numbers):
        def __getitem__(self, index: int) -> Any:
            return np.array([[index]]), np.array([[0.0]])

    model = Net([tf_keras.layers.Dense(1, input_shape=(1,))])
    model.compile("sgd", "mse")
    random.seed(disturbance)
    with shuffled_by(7):
        model.fit(Rows(), epochs=2, verbose=0)
    assert seen == EXPECTED
