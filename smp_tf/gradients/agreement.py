"""Checks that replicas which receive the averages of different gradients are about to average the same places.

    replica 0   [ a step's average    nothing           ]   alike: each of a step's averages is on one replica
    replica 1   [ nothing             a step's average  ]
    replica 0   [ something           nothing           ]   not alike: replica 1 would not take part
    replica 1   [ nothing             something         ]
    replica 0   [ something           only zeros        ]   not alike, where replica 0 updates such a weight:
    replica 1   [ only zeros          something         ]   sums of a step's averages, filled up; would be halved

With shared slots, a gradient that a step has averaged is None on the replicas that do not update its weight. What a
script computes from it outside a function, or keeps in a variable, bears no mark. So a replica alone cannot tell it
from a gradient of the script's own. All replicas together can, by one small message before each average.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from smp_tf.errors import StepError
from smp_tf.job import runtime
from smp_tf.replicas import sums
from smp_tf.sharding import receivers

#: What a replica has at a place of a list, as the number that is sent.
NOTHING, OF_A_STEP, SOMETHING, ZEROS = range(4)
_WORDS = ("nothing", "what comes of a step", "what is not known to come from a step", "zeros")


def require_alike(gradients: Sequence[Any], todo: Collection[int], name: str, handles: Sequence[Any]) -> list[Any]:
    """Raises an error where replicas do not average the same places of a list. Every replica calls it.

    Args:
        gradients: tensors, sparse slices or None.
        todo: the places that this replica is about to average.
        name: name of the operation, equal on all replicas.
        handles: resource tensors of variables. The op comes after their earlier uses, and ends before later ones.

    Returns:
        The gradients. In a function those of `todo` wait for the check.

    Raises:
        StepError: they differ, or sums of a step's averages were filled with zeros.
        tf.errors.OpError: the same, in a function.
    """
    owners = [_owners_of_its_shape(g) if i in todo else frozenset() for i, g in enumerate(gradients)]
    states = [_state(g, i in todo, bool(owners[i])) for i, g in enumerate(gradients)]
    replicas = runtime.current().topology.replicas
    exchange = sums.exchange_of(replicas, name, handles)
    # The length comes first, since lists of other lengths have other numbers of elements.
    heard = exchange.allgather(tf.stack([tf.constant(len(states), tf.int32), *states]))
    is_owner = np.array([[r in found for r in range(replicas)] for found in owners], bool).reshape(-1, replicas)
    if tf.executing_eagerly():
        problem = _problem(heard.numpy(), is_owner)
        if problem:
            raise StepError(problem)
        return list(gradients)
    said = tf.numpy_function(lambda numbers: _problem(numbers, is_owner).encode(), [heard], tf.string)
    with tf.control_dependencies([tf.debugging.Assert(tf.equal(said, ""), [said], summarize=1)]):
        return [tf.nest.map_structure(tf.identity, g, expand_composites=True) if i in todo else g
                for i, g in enumerate(gradients)]  # fmt: skip


def _state(gradient: Any, is_todo: bool, may_be_zeros: bool) -> tf.Tensor:
    if gradient is None or not is_todo:
        return tf.constant(NOTHING if gradient is None else OF_A_STEP, tf.int32)
    if not may_be_zeros:
        return tf.constant(SOMETHING, tf.int32)
    return tf.where(tf.reduce_any(tf.not_equal(gradient, 0)), SOMETHING, ZEROS)


def _owners_of_its_shape(gradient: Any) -> frozenset[int]:
    """Returns the replicas that are the only ones to update a weight with the shape of a dense gradient."""
    if isinstance(gradient, tf.IndexedSlices):
        return frozenset()
    return frozenset(receivers.owners_of_shape(tf.convert_to_tensor(gradient)))


def _problem(heard: np.ndarray, is_owner: np.ndarray) -> str:
    """Returns words for what is wrong with what the replicas have; "" for nothing.

    Args:
        heard: what the replicas have said, one after the other.
        is_owner: by place and replica, whether that replica alone updates a weight with the shape of what is averaged.
    """
    places, replicas = is_owner.shape
    if heard.size != replicas * (places + 1) or set(heard[:: places + 1]) != {places}:
        return f"{_BEGIN} lists of different lengths, of {places} on this replica. {_ADVICE}"
    said = heard.reshape(replicas, places + 1)[:, 1:]
    for place, column in enumerate(said.T):
        has = "; ".join(f"replica {replica} has {_WORDS[state]}" for replica, state in enumerate(column))
        takes_part = column >= SOMETHING
        if takes_part.any() and not takes_part.all():
            return f"{_BEGIN} lists with unlike things in place {place}: {has}. {_ADVICE}"
        given = np.flatnonzero(column == SOMETHING)
        if given.size == 1 and is_owner[place, given[0]] and replicas > 1:
            return (
                f"{_BEGIN} zeros in place {place} on all replicas but replica {given[0]}, which updates a weight of "
                f"that shape: a step's averages, it seems, with zeros for those of other replicas, and their average "
                f"would be too small by a factor of {replicas}. {_ADVICE} (A gradient of the script's own that is "
                f"nothing but zeros on the others passes with a dimension more, gradient[tf.newaxis].)"
            )
    return ""


_BEGIN = "With shard_optimizer_state smp.average_gradients was given"
_ADVICE = (
    "There a replica has the averages of the gradients of weights that it updates, and None for the others. What "
    "accumulate() gives is averaged, and sums of it are: apply them as they are, with None for those of other "
    "replicas, and pass only gradients of the script's own variables, on all replicas."
)
