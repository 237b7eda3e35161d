"""Takes the batches of all replicas for one batch of a training, as far as they can be joined."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from smp_tf.announce import announce
from smp_tf.job import exchange, runtime
from smp_tf.partition.mesh import CommGroup
from smp_tf.training.once_per_batch import once_over_replicas
from smp_tf.training.replica_batches import NextBatch, ReplicaBatches, SizesOfReplicas
from smp_tf.training.replica_states import ReplicaStates
from smp_tf.whole_batch.batch_results import BatchResults
from smp_tf.whole_batch.noted_trace import BatchTraces
from smp_tf.whole_batch.own_samples import OwnSamples


class ReplicaUnion:
    """The batch that the batches of all replicas are together; that of this replica alone where each has its own.

    Args:
        step: words for the step.
        over_replicas: whether the batches of all replicas are one batch.
    """

    def __init__(self, step: str, over_replicas: bool) -> None:
        self._step = step
        self._over_replicas = over_replicas
        self._batches = ReplicaBatches(over_replicas)
        self._sets = SizesOfReplicas()
        self._has_agreed = False
        #: Which states hold the samples of all replicas.
        self.states = ReplicaStates(step)
        #: Samples of all replicas in the batch that came last.
        self.sizes: Sequence[int] = []
        #: What a program for this batch is for besides the types of its arguments.
        self.also: Hashable = None
        #: The arguments, by number, that are parts of ragged or sparse tensors.
        self.composites: set[int] = set()

    def next(self, iterator: Any) -> NextBatch:
        """Returns the next batch of this replica, and what is known of those of the others.

        Args:
            iterator: gives batches.
        """
        found = self._batches.next(iterator)
        self.sizes = found.sizes
        self.also = self._sets.own(found.sizes) if self.has_several else None
        return found

    @property
    def has_several(self) -> bool:
        """Returns whether there are several replicas whose batches are one."""
        return self._over_replicas and runtime.current().topology.replicas > 1

    @property
    def is_apart(self) -> bool:
        """Returns whether their batches cannot be joined."""
        return self.states.is_apart

    @property
    def comes_together(self) -> bool:
        """Returns whether all replicas come together to a new program for the batch that came last."""
        return self._sets.come_together

    @property
    def samples(self) -> OwnSamples:
        """Returns the samples of the batch that came last, and which of them this replica has."""
        running = runtime.current()
        replica = running.topology.replica if self.has_several else 0
        return OwnSamples(tuple(self.sizes), replica, running.config.microbatches)

    def begin_program(self) -> None:
        """Notes that a new program is made."""
        self._has_agreed = False

    def once_per_batch(self, traces: BatchTraces) -> BatchResults:
        """Returns what is computed once for the batches of all replicas; of gradients alone where these are apart.

        Args:
            traces: the traces of a new program's step.
        """
        is_open, once = self.also is None, None
        if not self.is_apart:
            once = once_over_replicas(traces, self._sets, is_open=is_open, of_samples=True)
        if once is None or not self.can_join(once):
            once = once_over_replicas(traces, self._sets, is_open=is_open, of_samples=False)
        return once

    def can_join(self, once: BatchResults | None) -> bool:
        """Returns whether the batches of all replicas can be joined for a new program.

        Args:
            once: what it computes once of them; None where this replica has failed to find that.
        """
        key = why = None
        if once is not None and once.joined is not None:
            key, why = once.joined.key, once.joined.why_not(self.composites)
        if self.comes_together and not self._has_agreed:
            self._has_agreed = True
            name = f"what {self._step} computes once of batches of {list(self.sizes)} samples"
            said = exchange.allgather_json(key, CommGroup.RDP_GROUP, name=name)
            if any(other != said[0] for other in said):
                why = "their batches differ in size, and their graphs with them"
            if why is not None:
                self.part(why)
        return why is None

    def part(self, why: str) -> None:
        """Lets each replica compute of its own microbatches, from now on, what is computed once per batch.

        Args:
            why: the reason, without a full stop.
        """
        if self.is_apart:
            return
        self.states.is_apart = True
        announce(
            f"{self._step}: the batches of all replicas are not joined, so metrics and logs are computed for each "
            f"microbatch and averaged: {why}.",
            runtime.current().topology.rank,
        )
