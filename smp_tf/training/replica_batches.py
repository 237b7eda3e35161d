"""Takes the next batch of a training on all replicas, which tell each other what they have.

replica 0   8 samples ┐
                      ├─▶ 13 samples, of one kind: what is computed once is computed of all of them
replica 1   5 samples ┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from smp_tf.errors import RankMismatchError
from smp_tf.job import exchange, runtime
from smp_tf.partition.mesh import CommGroup
from smp_tf.steps.signatures import OWN_SIZES


@dataclass(frozen=True)
class NextBatch:
    """A batch of this replica, and what is known of those of the others.

    Args:
        batch: the batch.
        sizes: samples of all replicas' batches, in their order; of this one's alone where each has batches of its own.
        is_alike: whether the batches have the same types and shapes but for the number of samples.
    """

    batch: Any
    sizes: list[int]
    is_alike: bool


class ReplicaBatches:
    """The batches of a training, or of an evaluation or a prediction, in which each replica has its own.

    Args:
        over_replicas: whether the batches of all replicas are one batch.
    """

    def __init__(self, over_replicas: bool) -> None:
        self._over_replicas = over_replicas
        self._asked = 0

    def next(self, iterator: Any) -> NextBatch:
        """Returns the next batch, once every replica is known to have one, since their gradients are summed.

        Args:
            iterator: gives batches.

        Raises:
            RankMismatchError: a replica has no more batches, but another one has.
        """
        topology = runtime.current().topology
        if not self._over_replicas or topology.replicas == 1:
            batch = next(iterator)
            return NextBatch(batch, [samples_of(batch)], True)
        batch, end = None, None
        try:
            batch = next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError) as error:
            end = error
        self._asked += 1
        mine = None if end is not None else [samples_of(batch), _kinds(batch)]
        said = exchange.allgather_json(mine, CommGroup.RDP_GROUP, name=f"batch {self._asked} of the training")
        if end is not None and not any(said):
            raise end
        if not all(said):
            without = ", ".join(str(replica) for replica, has_one in enumerate(said) if not has_one)
            raise RankMismatchError(
                f"The data of replica {without} of {topology.replicas} ended before batch {self._asked} of the "
                f"training, and others have more. Every replica needs the same number of batches: divide the data with "
                f"smp.shard_dataset, or give fit steps_per_epoch."
            )
        return NextBatch(batch, [samples for samples, _ in said], all(kinds == said[0][1] for _, kinds in said))


class SizesOfReplicas:
    """The sizes that the replicas' batches have had together.

    The first two sets of sizes get programs of their own, so that all replicas come to these together. All others share
    one, unless the step needs its sizes.
    """

    def __init__(self) -> None:
        self._own: list[tuple[int, ...]] = []
        self._has_shared = False
        #: Whether all replicas come together to a new program for the sizes that came last.
        self.come_together = True
        #: Whether every set of sizes gets a program of its own.
        self.all_are_own = False

    def own(self, sizes: Sequence[int]) -> tuple[int, ...] | None:
        """Returns the sizes where they get a program of their own; None where they share one.

        Args:
            sizes: samples of every replica's batch.
        """
        found = tuple(sizes)
        if len(self._own) < OWN_SIZES and found not in self._own:
            self._own.append(found)
        is_own = self.all_are_own or found in self._own
        self.come_together = is_own or not self._has_shared
        self._has_shared = self._has_shared or not is_own
        return found if is_own else None


def samples_of(batch: Any) -> int:
    """Returns the number of samples in a batch; 0 where its first tensor does not say it.

    Args:
        batch: the batch.
    """
    first: Any = next(iter(tf.nest.flatten(batch)), None)
    return int(first.shape[0] or 0) if getattr(first, "shape", None) else 0


def with_samples(batch: Any, samples: int, wanted: int) -> Any:
    """Returns a batch of the same types with another number of samples, which hold nothing of use.

    Args:
        batch: the batch.
        samples: how many it has.
        wanted: how many are wanted.
    """

    def changed(value: Any) -> Any:
        shape = getattr(value, "shape", None)
        has_rows = shape is not None and tf.TensorShape(shape).rank and shape[0] == samples
        if not has_rows or wanted == samples:
            return value
        return value[:wanted] if wanted < samples else tf.gather(value, tf.zeros([wanted], tf.int32))

    return tf.nest.map_structure(changed, batch)


def _kinds(batch: Any) -> list[Any]:
    """Returns the types of a batch's tensors, and their shapes but for the number of samples, as JSON holds them."""
    found: list[Any] = []
    for value in tf.nest.flatten(batch):
        shape = getattr(value, "shape", None)
        rest = list(shape[1:]) if shape is not None and tf.TensorShape(shape).rank else None
        found.append([type(value).__name__ if shape is None else value.dtype.name, rest])
    return found
