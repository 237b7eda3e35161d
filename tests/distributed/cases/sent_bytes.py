"""The bytes that a rank gives to the collectives of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import horovod.tensorflow as hvd
import tensorflow as tf


@contextlib.contextmanager
def counted(named: str = "smp_gradients") -> Iterator[dict[str, int]]:
    """Within this context graphs that are traced tell the bytes that an execution gives to each kind of collective.

    Args:
        named: what the names of those begin with that are counted.
    """
    found: dict[str, int] = {}

    def counting(name: str) -> Any:
        real = getattr(hvd, name)

        def count(given: Any, *args: Any, **kwargs: Any) -> Any:
            if named in kwargs["name"] and "_weight_" not in kwargs["name"]:
                tensors = tf.nest.flatten(given)
                found[name] = found.get(name, 0) + sum(t.shape.num_elements() * t.dtype.size for t in tensors)
            return real(given, *args, **kwargs)

        return mock.patch.object(hvd, name, count)

    with counting("alltoall"), counting("allgather"), counting("grouped_allreduce"):
        yield found
