"""How a batch is cut into microbatches: how each argument is cut, and how many samples each microbatch has."""

from __future__ import annotations

from dataclasses import dataclass

from smp_tf.batch.microbatches import SplitArgument


@dataclass(frozen=True)
class CutBatch:
    """A batch, cut into microbatches.

    Args:
        arguments: how the step's tensor arguments are cut.
        microbatches: number of microbatches.
        sizes: samples of each microbatch; empty where the number of samples is unknown.
    """

    arguments: tuple[SplitArgument, ...]
    microbatches: int
    sizes: tuple[int, ...]

    @property
    def size(self) -> int | None:
        """Returns the samples of every microbatch; None where they differ or are unknown."""
        return self.sizes[0] if len(set(self.sizes)) == 1 else None

    @property
    def samples(self) -> int:
        """Returns the samples of the largest microbatch; 1 where they are unknown."""
        return max(self.sizes, default=1)
