"""Collectives: what all ranks of a group call together, each time under one name.

    rank 0  a ─┐  all_reduce   a + b      all_gather   a, b      all_to_all   a0, b0      broadcast   a
    rank 1  b ─┘               a + b                   a, b                   a1, b1                  a

Everything above this room asks `collectives()`, and nobody else knows which library does it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from smp_tf import tf_internals
from smp_tf.collectives.horovod import Horovod
from smp_tf.job_state import JobState


class Collectives(Protocol):
    """What a library of collectives does for smp_tf.

    All methods take the `group`, one of `runtime.current().process_sets`, and a `name`: it is equal on all ranks of the
    group, and no other collective that may be waited for meanwhile has it. Within a function each runs once whenever
    the function does, since other ranks wait for it. `handles` are resource tensors of variables: the collective comes
    after their earlier uses, and is done before later ones, wherever these are. So one name may stand for all of them.
    """

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], group: Any, name: str, *, handles: Sequence[Any] = ()
    ) -> list[tf.Tensor]:
        """Returns the sums over the ranks of tensors that all have, with the same shapes and types.

        Raises:
            StepError: A tensor is of a type that has no sum.
        """

    def all_gather(self, tensor: tf.Tensor, group: Any, name: str, *, handles: Sequence[Any] = ()) -> tf.Tensor:
        """Returns the tensors of all ranks one after the other, along the first axis, which alone may differ.

        Raises:
            StepError: The tensor is of a type that cannot be sent.
        """

    def all_to_all(
        self,
        tensor: tf.Tensor,
        group: Any,
        name: str,
        *,
        splits: tf.Tensor | None = None,
        handles: Sequence[Any] = (),
    ) -> tf.Tensor:
        """Returns what all ranks have for this one, one after the other.

        Args:
            tensor: What this rank has for all, in their order, along the first axis.
            group: See the class.
            name: See the class.
            splits: How many entries go to each rank; None: as many to each.
            handles: See the class.

        Raises:
            StepError: The tensor is of a type that cannot be sent.
        """

    def broadcast(self, tensor: tf.Tensor, root: int, group: Any, name: str) -> tf.Tensor:
        """Returns what one rank has, whose number in the world is `root`; all have tensors of its shape and type.

        Raises:
            StepError: The tensor is of a type that cannot be sent.
        """


_of_job: JobState[Collectives] = JobState(Horovod)


def collectives() -> Collectives:
    """Returns the collectives of the job that runs."""
    return _of_job()


@functools.cache
def order() -> tf.Variable:
    """Returns a variable whose uses have an order: what is given its handle is done before the next that is.

    It is kept as long as the process: so long functions may live that were traced with it.
    """
    return tf_internals.make_plain_variable(initial_value=0, trainable=False, name="smp_order")
