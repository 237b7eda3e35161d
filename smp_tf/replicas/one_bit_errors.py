"""The errors of one-bit averages: what each replica has not sent yet of a list of weights, in groups of limited bytes.

    weights   kernel, bias │ embedding      groups, in which they are averaged one after the other
    worker    of both      │ of it          what this replica wanted to send
    server    its part     │ its part       what it wanted to hand out, of the part that it averages

These variables belong to no model. Each replica has its own, so they are neither saved nor compared nor given to
others. A training that goes on in a new process begins with zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from smp_tf.errors import StepError
from smp_tf.job import runtime
from smp_tf.pipeline.run.reduction import MOST_BYTES
from smp_tf.replicas import one_bit_sums, sums
from smp_tf.replicas.one_bit_sums import BLOCK, BlockFormat, Errors
from smp_tf.variables import store

#: Bytes of an element, as it is sent and as an error.
_FLOAT = 4


@dataclass(frozen=True)
class Group:
    """Weights that are averaged together.

    Args:
        number: number of the group in its list.
        members: positions of the weights in the list.
        form: how the weights lie in blocks.
        errors: errors of this replica.
    """

    number: int
    members: tuple[int, ...]
    form: BlockFormat
    errors: Errors

    def average(self, tensors: Sequence[tf.Tensor], name: str, handles: Sequence[Any]) -> list[tf.Tensor]:
        """Returns the averages over the replicas of their tensors for each member. It sends one bit per element.

        Args:
            tensors: tensors of floats, one per member.
            name: unique name of the operations, equal on the ranks of the group.
            handles: resource tensors of variables. The op comes after their earlier uses, and before later ones.

        Returns:
            Tensors of float32, in the shapes of the given ones.
        """
        replica = runtime.current().topology.replica
        exchange = sums.exchange_of(self.form.replicas, name, handles)
        return one_bit_sums.average(tensors, self.form, self.errors, exchange, replica)


class ErrorFeedback:
    """The groups of every list of weights that an optimizer was given, with their errors."""

    def __init__(self) -> None:
        self._groups: dict[tuple[Any, ...], list[Group]] = {}

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all errors of this replica."""
        errors = [group.errors for groups in self._groups.values() for group in groups]
        return sum(_FLOAT * v.shape.num_elements() for e in errors for v in (e.worker, e.server))

    def groups_of(self, weights: Sequence[tf.Variable]) -> list[Group]:
        """Returns the groups of a list of weights. The first call since `smp.init` makes them, with zeros as errors.

        Args:
            weights: the weights, in the same order on every replica.

        Raises:
            StepError: the shape of a weight is unknown.
        """
        start = runtime.starts()
        # In an earlier job the replicas may have been other ranks, and may have averaged other parts.
        self._groups = {key: groups for key, groups in self._groups.items() if key[0] == start}
        key = (start, *(weight.ref() for weight in weights))
        if key not in self._groups:
            self._groups[key] = _grouped(weights)
        return self._groups[key]


def errors_per_weight(replicas: int) -> float:
    """Returns the size of a replica's errors, in sizes of the weights: once all, and the part that it averages."""
    return 1.0 + 1.0 / replicas


def _grouped(weights: Sequence[tf.Variable]) -> list[Group]:
    groups: list[list[int]] = []
    filled = MOST_BYTES
    for position, weight in enumerate(weights):
        if not weight.shape.is_fully_defined():
            raise StepError(
                f"What is sent as one bit an element is divided among the replicas before it is there, so weights "
                f"need a known shape. Received: {weight.name!r} of shape {weight.shape}. Give it one, or leave "
                f'"gradient_compression": "1bit" out.'
            )
        # A group is closed only once it is full. So a small bias travels with its kernel, however large that is.
        if filled >= MOST_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(position)
        filled += _FLOAT * weight.shape.num_elements()
    replicas = runtime.current().topology.replicas
    return [_made(number, members, weights, replicas) for number, members in enumerate(groups)]


def _made(number: int, members: Sequence[int], weights: Sequence[tf.Variable], replicas: int) -> Group:
    form = BlockFormat(tuple(weights[position].shape.num_elements() for position in members), replicas)
    worker, server = (
        store.make_script_variable(
            initial_value=functools.partial(tf.zeros, [blocks, BLOCK]), trainable=False, name=f"smp_{kind}_error"
        )
        for kind, blocks in (("worker", form.blocks), ("server", form.blocks_of_part))
    )
    return Group(number, tuple(members), form, Errors(worker, server))
