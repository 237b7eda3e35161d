"""The sums over the microbatches that a stage makes: which tensors it adds up, on which device, and what it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from smp_tf.partition.graph.op_graph import Tensor
from smp_tf.partition.split.split import Split
from smp_tf.pipeline.run.accumulator import Accumulator, fits


@dataclass(frozen=True)
class WantedSums:
    """What is wanted from the sums over the microbatches.

    Args:
        kept: positions of gradient outputs whose value per microbatch is wanted besides their sum.
        is_weighted: whether microbatches weigh differently in sums.
        device: TensorFlow's name of the device where sums are kept; None for where what is summed is.
    """

    kept: frozenset[int] = frozenset()
    is_weighted: bool = False
    device: str | None = None


@dataclass(frozen=True)
class MicrobatchSums:
    """The sums over the microbatches that a stage makes.

    Args:
        tensors: the tensors made here whose sum is wanted, alone or besides their values.
        kept: those of them whose value per microbatch is wanted, too.
        accumulators: the sums that the functions add to themselves; other sums are added up in the caller's graph.
        is_weighted: whether microbatches weigh differently in sums.
        device: the device where sums are kept; None for where what is summed is.
    """

    tensors: frozenset[Tensor]
    kept: frozenset[Tensor]
    accumulators: Mapping[Tensor, Accumulator]
    is_weighted: bool
    device: str | None


def summed_of(split: Split, stage: int) -> set[Tensor]:
    """Finds a stage's tensors whose sum over the microbatches is wanted, alone or besides their values.

    Args:
        split: the cut step.
        stage: which stage.
    """
    made = {t for segment in split.segments_of(stage).values() for t in segment.outputs}
    summed = {o.tensor for o in split.outputs if o.is_summed and split.stage_of(o) == stage}
    return summed | {t for o in split.outputs for t in o.summands if t in made}


def sums_of(split: Split, stage: int, wanted: WantedSums, microbatches: int, name: str) -> MicrobatchSums:
    """Prepares the sums of a stage, each with its own storage.

    Args:
        split: the cut step.
        stage: which stage.
        wanted: what is wanted from them.
        microbatches: their number.
        name: the begin of the names of the sums.
    """
    made = {t for segment in split.segments_of(stage).values() for t in segment.outputs}
    summed = summed_of(split, stage)
    # A single microbatch is its own sum.
    accumulators = {
        t: Accumulator(split.graph.type_of(t), f"{name}_{count}", wanted.device)
        for count, t in enumerate(sorted(summed & made))
        if microbatches > 1 and fits(split.graph.type_of(t))
    }
    kept = frozenset(split.outputs[position].tensor for position in wanted.kept) & summed
    return MicrobatchSums(frozenset(summed), kept, accumulators, wanted.is_weighted, wanted.device)


def sums_of_functions(split: Split, stage: int, microbatches: int) -> frozenset[Tensor]:
    """Returns the tensors of a stage whose sum over the microbatches a task's function can have.

    Args:
        split: the cut step.
        stage: which stage.
        microbatches: their number.
    """
    made = {t for segment in split.segments_of(stage).values() for t in segment.outputs}
    summed = summed_of(split, stage) & made
    # A single microbatch is its own sum.
    return frozenset(t for t in summed if microbatches == 1 or fits(split.graph.type_of(t)))
