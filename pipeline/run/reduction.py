"""Averages gradients over replicas while the step still runs, in buckets, each as soon as it is complete.

    last task     B3 ├─ g7 ─ g6 ─┬─ g5 ─ g4 ─┬─ g3 ─ g2 ─ g1 ─┤
    replicas                     └─ bucket 0 ─┴─ bucket 1 ──────┴─ bucket 2 ─┤ end of the step, optimizer

A gradient is complete when the last microbatch has been added to it. Buckets take the gradients that the step returns
from the last to the first. That is about the order in which backward makes those of a list of weights. Buckets are the
same whatever program a replica runs, since one with a smaller batch may run fewer microbatches. Where nothing is sent
or received after the last task that makes gradients, as on the first stage, buckets begin within that task
(`early_sums`). Elsewhere that would compete with what another stage waits for. There they begin after the task, while
the stages before still compute. A weight may change once all tasks of its rank have ended and its own gradient is
there, so the optimizer need not wait for other buckets. The step ends when all buckets are there. Its next call has
averages with the same names, and Horovod takes one of a name at a time.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2.3:
buckets, of the parameters in reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import tensorflow as tf

from smp_tf.partition.graph.op_graph import Tensor
from smp_tf.partition.split.split import Split, Transfer, Visit
from smp_tf.partition.split.step_outputs import StepOutputPlan
from smp_tf.pipeline.task import BucketMakers, Task

#: The bytes with which a bucket is full. The source measured them as best.
MOST_BYTES = 25 << 20
#: The least bytes of a bucket. All replicas have to agree on every bucket, so small ones are put together.
LEAST_BYTES = 1 << 20
#: The share of a stage's gradients with which a bucket is also full, since the last bucket is there only when all
#: gradients are.
SHARE = 1 / 8


@dataclass(frozen=True)
class Bucket:
    """Gradients that are averaged together.

    Args:
        number: number of the bucket on its stage.
        positions: positions of the gradients among the outputs of the step.
        makers: what makes the gradients.
        is_sparse: whether they are the parts of one sparse gradient, which are kept for every microbatch.
    """

    number: int
    positions: tuple[int, ...]
    makers: BucketMakers
    is_sparse: bool = False


@dataclass(frozen=True)
class Gradients:
    """What is known of a step's gradients, besides its graph, by position among the outputs.

    Args:
        elsewhere: those whose sums over the replicas another replica gets, and this one does not.
        nbytes: bytes of outputs that were made from gradients, the same on all replicas.
    """

    elsewhere: frozenset[int] = frozenset()
    nbytes: Mapping[int, int] = field(default_factory=dict)


class Sums(NamedTuple):
    """The sums of a bucket that a replica gets.

    Attributes:
        tensors: the sums over the replicas for the positions that no other replica gets alone, in order.
        there: the received tensors. The sums are there when all of these are.
    """

    tensors: list[tf.Tensor]
    there: list[tf.Tensor]


#: Sums the gradients of a bucket, in the order of its positions, over the replicas.
Reduce = Callable[[Sequence[tf.Tensor], Bucket], Sums]


def limit_of_buckets(total: int) -> int:
    """Returns the bytes that make a bucket full.

    Args:
        total: bytes of all gradients of a stage.

    Returns:
        Bytes.
    """
    return min(MOST_BYTES, max(LEAST_BYTES, int(total * SHARE)))


def group_gradients(
    split: Split, stage: int, limit: int | None = None, known: Mapping[int, int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Puts the gradients that a stage has into groups of limited bytes.

    Args:
        split: the cut step.
        stage: which stage.
        limit: bytes with which a group is full; None for `limit_of_buckets`.
        known: bytes of gradients, as in `Gradients.nbytes`.

    Returns:
        Groups of positions among the outputs of the step, from the last to the first. A gradient that is returned twice
        is summed twice.
    """
    # Only positions count. Which gradients are one tensor may depend on the batch, which differs between replicas.
    positions = [i for i in reversed(range(len(split.outputs))) if split.outputs[i].gets_sum(stage, split.placement)]
    sizes = _sizes(split, positions, known)
    limit = limit_of_buckets(sum(sizes.values())) if limit is None else limit
    groups: list[list[int]] = []
    filled = limit
    for position, size in sizes.items():
        # A group is closed only once it is full. So a small bias travels with its kernel, however large that is.
        if filled >= limit:
            groups.append([])
            filled = 0
        groups[-1].append(position)
        filled += size
    return tuple(map(tuple, groups))


def plan_buckets(
    split: Split, stage: int, groups: Sequence[tuple[int, ...]], known: Mapping[int, int] | None = None
) -> tuple[Bucket, ...]:
    """Says what makes each group of gradients.

    Args:
        split: the cut step.
        stage: which stage.
        groups: the groups of `group_gradients`.
        known: bytes of gradients, as in `Gradients.nbytes`.

    Returns:
        The buckets, in the order of the groups.
    """
    makers, brought = _makers(split, stage, lambda transfer: transfer.is_sum)
    sizes = _sizes(split, [position for group in groups for position in group], known)
    found = []
    for number, group in enumerate(groups):
        parts = {t for position in group for t in parts_of(split.outputs[position])}
        segments = frozenset(when for tensor in parts for when in makers.get(tensor, ()))
        edges = frozenset(edge for tensor in parts for edge in brought.get(tensor, ()))
        nbytes = sum(sizes[position] for position in group)
        found.append(Bucket(number, group, BucketMakers(stage, number, segments, edges, nbytes)))
    return tuple(found)


def plan_sparse_buckets(
    split: Split, stage: int, sparse: Sequence[tuple[int, ...]], first: int, summed: Collection[Tensor]
) -> tuple[Bucket, ...]:
    """Says what makes the sparse gradients that a stage has. Each is a bucket of its own.

    Args:
        split: the cut step.
        stage: which stage.
        sparse: the positions of the parts of each sparse gradient that the step returns.
        first: number of the first of these buckets.
        summed: tensors that the stage keeps only the sum of.
    """
    makers, brought = _makers(split, stage, lambda transfer: not transfer.once_per_step)
    found: list[Bucket] = []
    for positions in sparse:
        parts = [split.outputs[position].tensor for position in positions]
        if any(t in summed or (t not in makers and t not in brought) for t in parts):
            continue
        segments = frozenset(when for t in parts for when in makers.get(t, ()))
        edges = frozenset(edge for t in parts for edge in brought.get(t, ()))
        number = first + len(found)
        found.append(Bucket(number, positions, BucketMakers(stage, number, segments, edges), is_sparse=True))
    return tuple(found)


def _makers(
    split: Split, stage: int, counts: Callable[[Transfer], bool]
) -> tuple[dict[Tensor, set[tuple[int, int, int]]], dict[Tensor, set[int]]]:
    """Finds which segments of a stage make each tensor, and which of the relevant transfers bring it."""
    makers: dict[Tensor, set[tuple[int, int, int]]] = {}
    for when, segment in split.segments_of(stage).items():
        for tensor in segment.outputs:
            makers.setdefault(tensor, set()).add(when)
    brought: dict[Tensor, set[int]] = {}
    for transfer in split.transfers:
        if transfer.tensor is not None and split.placement[transfer.dst_chunk] == stage and counts(transfer):
            brought.setdefault(transfer.tensor, set()).add(transfer.index)
    return makers, brought


def _sizes(split: Split, positions: Sequence[int], known: Mapping[int, int] | None) -> dict[int, int]:
    """Returns the bytes of gradients, by position among the outputs."""
    nbytes = {t: split.graph.variables[g.variable].type.nbytes() for g in split.graph.gradients for t in g.tensors}
    # For a gradient whose shape depends on the batch, other replicas may know another size.
    known = known or {}
    return {position: known.get(position, nbytes.get(split.outputs[position].tensor, 0)) for position in positions}


def parts_of(output: StepOutputPlan) -> tuple[Tensor, ...]:
    """Returns the tensors whose sums over the microbatches make up an output."""
    return output.summands or (output.tensor,)


def when_of(task: Task) -> Visit:
    """Returns the visit of a microbatch that a compute task is. It says which segment the task runs."""
    assert task.sweep is not None
    return Visit(task.chunk, task.sweep, task.part)


@dataclass(frozen=True)
class Averaging:
    """How the gradients of a step are averaged over the replicas.

    Args:
        reduce: sums tensors over the replicas; None where the step is planned and not run.
        gradients: what is known of the gradients that are summed.
        bucket_bytes: with so many, gradients that are summed together are enough; None for what is usual.
        sparse: the positions of the parts of each sparse gradient among the outputs.
        others: bytes of what a stage averages besides, by stage, where it is not known which gradients are sparse.
    """

    reduce: Reduce | None = None
    gradients: Gradients = Gradients()
    bucket_bytes: int | None = None
    sparse: Sequence[tuple[int, ...]] = ()
    others: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Reduction:
    """How gradients of a stage are averaged in the graph of the step.

    Args:
        reduce: sums tensors over the replicas.
        gradients: what is known of the gradients.
        buckets: the buckets, by the numbers of the REDUCE tasks.
    """

    reduce: Reduce
    gradients: Gradients = Gradients()
    buckets: tuple[Bucket, ...] = ()

    def positions_here(self, bucket: Bucket) -> list[int]:
        """Returns the gradients of a bucket whose sums this replica gets, in order."""
        return [position for position in bucket.positions if position not in self.gradients.elsewhere]
