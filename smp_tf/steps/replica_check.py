"""Notices when replicas no longer have equal weights, or are given equal batches.

Every rank of a stage writes what it knows into a vector. The vector travels with the weight of its gradients, whose sum
over the replicas is needed anyhow. So there is no additional message, and nothing more to wait for.

    replica 0   h(kernel)   h(bias)  │ h(batch)     0     │ ┐
    replica 1   h(kernel)   h(bias)  │    0      h(batch) │ ┴─▶ sum = 2 h(kernel)   2 h(bias) │ h(batch 0)  h(batch 1)

Where replicas share the optimizer's slots, each gets weights from the others, so weights are equal after the first
step, whatever they were before. So they are compared before it, too.

The weights are the trainable ones of the models that this rank stores. Moving averages differ by what a replica has
seen, and nothing is known about a script's own variables. Replicas begin with equal values (`equal_start`).

Hashes are whole numbers, small enough for exact sums. Weights are equal where the sum is the own hash times the number
of replicas. Hashes of batches are next to each other. On steps that are not due, zeros are sent.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from smp_tf.job.content_hash import content_hash, content_hashes
from smp_tf.job_state import JobState
from smp_tf.ops.graph_op import run_independently
from smp_tf.sharding import layouts
from smp_tf.tf_internals import cond_independently
from smp_tf.variables import store

#: The step before which different weights are an error. It is not the first, since a broadcast of what one replica has
#: loaded, such as that of `smp.callbacks`, comes after it.
_ERROR_STEP = 1
#: From then on they are compared after every so many steps.
_EVERY = 100
#: The steps on which batches are compared. The first is not among them, since data that happens to begin alike is no
#: mistake. There are several, for data that begins differently and goes on alike.
_FIRST_BATCH, _LAST_BATCH = 1, 9
#: Bits of a whole number that float64 holds.
_BITS = 53


class _Steps:
    """Counts of steps, in variables."""

    def __init__(self) -> None:
        #: Counts by what a step function is known by. They are equal on all replicas, whatever programs these run.
        self.counters: dict[str, tf.Variable] = {}
        #: Whether a message has said that weights differ, and whether one has said that batches are equal.
        self.told = _variable(False, "smp_told_of_weights")
        self.told_of_batches = _variable(False, "smp_told_of_batches")


_steps = JobState(_Steps)


def _variable(value: Any, name: str) -> tf.Variable:
    return store.make_script_variable(initial_value=value, trainable=False, name=name)


def _steps_before(known: str) -> tf.Tensor:
    counters = _steps().counters
    if known not in counters:
        counters[known] = _variable(np.int64(0), f"{known}_compared".replace("/", "_"))
    return counters[known].assign_add(1, read_value=True) - 1


class ReplicaCheck:
    """The check of one step, in the graph being traced.

    Args:
        step: name of the step function, for messages.
        known: what the step function is known by, on all ranks.
        after: the op before which no weight may be read.
        weights: the trainable variables that this rank stores, the same on every rank of the group.
        batch: the tensors that the step was given, where batches are compared. They should differ between replicas.
        replica: the replica of this rank.
        ranks: world ranks of the group, one per replica.
    """

    def __init__(
        self,
        step: str,
        known: str,
        after: tf.Operation,
        weights: Sequence[tf.Variable],
        batch: Sequence[tf.Tensor],
        replica: int,
        ranks: Sequence[int],
    ) -> None:
        self._step = step
        self._weights = list(weights)
        self._replica = replica
        self._ranks = list(ranks)
        self._before = _steps_before(known)
        with tf.control_dependencies([after]):
            self._before = tf.identity(self._before)
        run_independently(self._before.op)
        self._own = self._hashes_of_weights()
        self._compares_batches = bool(batch)
        parts = [self._own, self._hash_of_batch(batch)] if batch else [self._own]
        #: The vector to be summed over the replicas, float64[n].
        self.sent: tf.Tensor = tf.concat(parts, axis=0)

    def compare(self, summed: tf.Tensor) -> None:
        """Adds the comparison to the current graph.

        Weights that differ before the second step are an error, since replicas began with different ones or were given
        different gradients. Later they may differ in the last bit, and a message says so once.

        Args:
            summed: the sum of `sent` over the replicas.
        """
        count = len(self._weights)
        if count:
            self._name_weight(tf.equal(summed[:count], self._own * len(self._ranks)))
        if self._compares_batches:
            self._name_equal_batches(summed[count:])

    def _name_weight(self, equal: tf.Tensor) -> None:
        names = tf.constant([variable.name for variable in self._weights])
        alike = tf.reduce_all(equal)
        begin = (
            f"smp_tf: replicas begin with equal weights and must keep them. Before this call of step {self._step!r}, "
            f"the ranks {self._ranks} do not have the same values of weight"
        )
        name = tf.gather(names, tf.argmin(tf.cast(equal, tf.int32)))
        advice = (
            "Assign values on all replicas alike, and apply the same gradients on all: smp.average_gradients averages "
            "those that no step returned."
        )
        rounding = (
            "It may be rounding alone, of ranks with other processors or numbers of threads, or of sparse gradients on "
            "a GPU. If they drift apart, some gradients are not averaged."
        )
        end = "Switch this check off with check_replicas=False. Steps before this one:"
        is_late = self._before > _ERROR_STEP
        tf.debugging.Assert(tf.logical_or(alike, is_late), [begin, name, advice, end, self._before], summarize=1)

        def tell() -> tf.Tensor:
            with tf.control_dependencies(
                [tf.print(begin, name, rounding, end, self._before, output_stream=sys.stderr)]
            ):
                return tf.identity(_steps().told.assign(True))

        differ_now = tf.logical_and(is_late, tf.logical_not(alike))
        tells = tf.logical_and(differ_now, tf.logical_not(_steps().told.read_value()))
        tf.cond(tells, tell, lambda: tf.constant(True))

    def _hashes_of_weights(self) -> tf.Tensor:
        count = len(self._weights)
        if not count:
            return tf.zeros([0], tf.float64)
        later = tf.logical_and(self._before > _ERROR_STEP, tf.equal(self._before % _EVERY, 0))
        due = tf.logical_or(tf.equal(self._before, _ERROR_STEP), later)
        if layouts.are_shared():
            due = tf.logical_or(due, tf.equal(self._before, 0))

        def hashes() -> tf.Tensor:
            found: list[tf.Tensor] = []
            for variable in self._weights:
                # One after the other, since from a GPU all of them would be in the host's memory at once.
                with tf.control_dependencies(found[-1:]):
                    found.append(content_hash(variable.read_value()))
            return self._as_float(tf.concat(found, axis=0))

        return cond_independently(due, hashes, lambda: tf.zeros([count], tf.float64))

    def _hash_of_batch(self, batch: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns a vector with the hash at this replica's place and zeros elsewhere."""
        replicas = len(self._ranks)
        own = cond_independently(
            tf.logical_and(self._before >= _FIRST_BATCH, self._before <= _LAST_BATCH),
            lambda: self._as_float(content_hash(content_hashes(batch))) + 1.0,
            lambda: tf.zeros([1], tf.float64),
        )
        return own * tf.one_hot(self._replica, replicas, dtype=tf.float64)

    def _as_float(self, hashes: tf.Tensor) -> tf.Tensor:
        """Returns as many bits of the hashes as keep a sum over the replicas exact."""
        dropped = tf.constant(64 - _BITS + len(self._ranks).bit_length(), tf.uint64)
        return tf.cast(tf.bitwise.right_shift(tf.bitcast(hashes, tf.uint64), dropped), tf.float64)

    def _name_equal_batches(self, hashes: tf.Tensor) -> None:
        """Says once, on the first of them, which replicas were given the same batch.

        Args:
            hashes: hash of the batch of every replica; zeros on steps that are not due.
        """
        pairs = tf.logical_and(tf.equal(hashes[:, None], hashes[None, :]), hashes > 0)
        counts = tf.reduce_sum(tf.cast(pairs, tf.int32), axis=1)
        first = tf.argmax(tf.cast(counts > 1, tf.int32))
        tells = tf.logical_and(tf.reduce_any(counts > 1), tf.logical_not(_steps().told_of_batches.read_value()))

        def speak() -> tf.Tensor:
            tf.print(
                "smp_tf: in call",
                self._before + 1,
                f"of step {self._step!r}, these replicas were given the same batch:",
                tf.reshape(tf.where(pairs[first]), [-1]),
                "- each should have a part of the data of its own, as smp.shard_dataset(dataset) shares it out. "
                "Where this is meant, check_inputs=False says nothing of it.",
                output_stream=sys.stderr,
                summarize=16,
            )
            return tf.constant(True)

        def tell() -> tf.Tensor:
            tf.cond(tf.equal(first, self._replica), speak, lambda: tf.constant(True))
            # All remember it, whichever prints it.
            return tf.identity(_steps().told_of_batches.assign(True))

        tf.cond(tells, tell, lambda: tf.constant(True))
