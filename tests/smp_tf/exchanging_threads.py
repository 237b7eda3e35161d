"""Replicas that are threads of one process, with what they exchange and how much that is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from smp_tf.replicas.equal_parts import Exchange


class Replicas:
    """Threads that exchange rows, and the bytes of each.

    Args:
        count: of replicas.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._barrier = threading.Barrier(count, timeout=60.0)
        self._rows: list[tf.Tensor] = [tf.constant(0)] * count
        self.bytes = [0] * count
        self.types: set[tf.DType] = set()

    def exchange(self, replica: int) -> Exchange:
        """How rows travel from and to a replica."""
        return Exchange(
            self.count,
            lambda rows: tf.stack([of[replica] for of in self.told(replica, rows)]),
            lambda row: tf.concat(self.told(replica, row), axis=0),
        )

    def told(self, replica: int, rows: tf.Tensor) -> list[tf.Tensor]:
        """What all replicas say, when all have said it."""
        self.types.add(rows.dtype)
        self.bytes[replica] += rows.dtype.size * int(tf.size(rows))
        self._rows[replica] = rows
        self._barrier.wait()
        found = list(self._rows)
        self._barrier.wait()
        return found

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """What the function gives on each replica."""
        with ThreadPoolExecutor(self.count) as threads:
            return list(threads.map(function, range(self.count)))
