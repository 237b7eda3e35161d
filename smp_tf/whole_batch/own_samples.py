"""Which samples of a whole batch are those of this replica, and how these are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smp_tf.batch.microbatches import sizes_of


@dataclass(frozen=True)
class OwnSamples:
    """The samples of a replica in the batch of all replicas.

    Args:
        sizes: samples of the replicas' batches, in their order.
        replica: number of this one.
        microbatches: how many microbatches are asked for.
    """

    sizes: Sequence[int]
    replica: int
    microbatches: int

    @property
    def total(self) -> int:
        """Returns the samples of all replicas."""
        return sum(self.sizes)

    @property
    def count(self) -> int:
        """Returns the samples of this replica."""
        return self.sizes[self.replica]

    @property
    def begin(self) -> int:
        """Returns how many samples come before those of this replica."""
        return sum(self.sizes[: self.replica])

    def rows_of(self, value: Any) -> Any:
        """Returns the rows of this replica's samples.

        Args:
            value: a tensor with one row, or as many for each, of the samples of all replicas.
        """
        if len(self.sizes) == 1:
            return value
        each = value.shape[0] // self.total
        return value[each * self.begin : each * (self.begin + self.count)]

    @property
    def parts(self) -> tuple[int, ...]:
        """Returns the samples of this replica's microbatches."""
        return tuple(sizes_of(self.count, min(self.count, self.microbatches)))
