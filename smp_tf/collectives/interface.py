"""Collectives, which all ranks of a group call together, each time under one name.

    rank 0  a ─┐  all_reduce   a + b      all_gather   a, b      all_to_all   a0, b0      broadcast   a
    rank 1  b ─┘               a + b                   a, b                   a1, b1                  a

All rooms above this one ask `collectives()`. Only this room knows which library implements them.
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

    All methods take the `group`, one of `runtime.current().process_sets`, and a `name`. The name is equal on all ranks
    of the group, and no other collective that is waited for at the same time has it. Within a function, each collective
    runs once in each run of the function, since other ranks wait for it. `handles` are resource tensors of variables.
    The collective comes after their earlier uses, and ends before later ones, wherever these are. So one name may stand
    for all of them.
    """

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], group: Any, name: str, *, handles: Sequence[Any] = ()
    ) -> list[tf.Tensor]:
        """Returns the sums over the ranks of tensors that have the same shapes and types on all of them.

        Raises:
            StepError: A tensor is of a type that has no sum.
        """

    def all_gather(self, tensor: tf.Tensor, group: Any, name: str, *, handles: Sequence[Any] = ()) -> tf.Tensor:
        """Returns the tensors of all ranks, joined along the first axis. Only its length may differ between ranks.

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
        """Returns the entries that all ranks have for this one, joined in rank order.

        Args:
            tensor: The entries that this rank has for all ranks, in rank order along the first axis.
            group: The group, as for all methods.
            name: The name of the call, as for all methods.
            splits: How many entries go to each rank; None for equally many.
            handles: Variables whose uses the call is ordered with, as for all methods.

        Raises:
            StepError: The tensor is of a type that cannot be sent.
        """

    def broadcast(self, tensor: tf.Tensor, root: int, group: Any, name: str) -> tf.Tensor:
        """Returns the tensor of world rank `root`. All ranks give tensors of its shape and type.

        Raises:
            StepError: The tensor is of a type that cannot be sent.
        """


_of_job: JobState[Collectives] = JobState(Horovod)


def collectives() -> Collectives:
    """Returns the collectives of the job that runs."""
    return _of_job()


@functools.cache
def order() -> tf.Variable:
    """Returns a variable that orders collectives: one with its handle ends before the next one with it begins.

    It is kept as long as the process lives, since functions that were traced with it may live as long.
    """
    return tf_internals.make_plain_variable(initial_value=0, trainable=False, name="smp_order")
