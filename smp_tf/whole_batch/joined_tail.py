"""Joins over the replicas what the tail of a step begins with, so that it is computed of the batches of all of them.

    replica 0   rows of its microbatches ┐
                                         ├─ joined, in the replicas' order ─▶ tail, on every replica alike
    replica 1   rows of its microbatches ┘

A tail begins as near to the results as tensors hold rows. So what travels is a number or a few for each sample.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from smp_tf.collectives.interface import collectives
from smp_tf.job import runtime
from smp_tf.partition.graph.op_graph import ARGUMENT, UNSENDABLE_DTYPES, OpGraph, Tensor
from smp_tf.partition.samples.batch_tail import Cut, Tail
from smp_tf.partition.samples.sample_rows import SampleRows
from smp_tf.whole_batch.tail_graph import blocks_swapped, by_block, in_a_row


class JoinedTail:
    """What a tail begins with, over all replicas.

    Args:
        step: words for the step.
        graph: the step's graph for the batch of all replicas.
        tail: the tail of the step.
        rows: what the tensors of that graph are made of, for a batch of one size.
    """

    def __init__(self, step: str, graph: OpGraph, tail: Tail, rows: SampleRows) -> None:
        self._graph = graph
        self._tail = tail
        axes = {number: rows.sample_axis(number) for number in tail.arguments}
        self._held = {number: axis for number, axis in sorted(axes.items()) if axis is not None}
        cuts = [[self._name_of(cut.whole), cut.axis, cut.blocks] for cut in tail.cuts]
        #: What has to be the same on all replicas, as JSON holds it.
        self.key: list[Any] = [cuts, list(tail.arguments), sorted(tail.results)]
        digest = hashlib.sha1(json.dumps([step, self.key]).encode()).hexdigest()[:12]
        # A replica that joins something else is waited for, and named, in place of being taken for one that does not.
        self._name = f"smp_batch_of_all_{digest}"

    @property
    def has_samples(self) -> bool:
        """Returns whether there is anything to join."""
        return bool(self._held) or any(cut.axis is not None for cut in self._tail.cuts)

    def why_not(self, composites: Collection[int]) -> str | None:
        """Returns why the tail cannot be computed of the batches of all replicas; None where it can.

        Args:
            composites: the arguments, by number, that are parts of ragged or sparse tensors.
        """
        dtypes = {
            node.source: node.outputs[0].dtype
            for node in (self._graph.nodes[number] for number in self._tail.nodes)
            if node.op == ARGUMENT
        }
        for number in self._tail.arguments:
            if number in composites or dtypes[number] in UNSENDABLE_DTYPES:
                return "ragged, sparse or text arguments of several replicas, which go into it, cannot be joined"
        return None

    def inputs(
        self, cuts: Sequence[Any], arguments: Mapping[int, Any], samples: Any, handles: Sequence[Any] = ()
    ) -> tuple[list[Any], dict[int, Any]]:
        """Returns the values that the tail begins with, joined over the replicas, in the graph being traced.

        Args:
            cuts: the values of the tail's cuts, of this replica.
            arguments: the step's tensor arguments that the tail reads, of this replica, by number.
            samples: the samples of this replica's batch.
            handles: resource tensors of variables, by which the messages come after others of the same names.
        """
        held = [(arguments[number], axis) for number, axis in self._held.items()]
        joined = join_cuts(self._tail.cuts, cuts, samples, self._name, held, handles=handles)
        count = len(self._tail.cuts)
        return joined[:count], {**arguments, **dict(zip(self._held, joined[count:], strict=True))}

    def _name_of(self, tensor: Tensor) -> str:
        return f"{self._graph.nodes[tensor.node].name}:{tensor.index}"


def join_cuts(
    cuts: Sequence[Cut],
    values: Sequence[Any],
    samples: Any,
    name: str,
    arguments: Sequence[tuple[Any, int]] = (),
    *,
    handles: Sequence[Any] = (),
) -> list[Any]:
    """Returns the tensors of the batch of all replicas where a tail begins, and then arguments.

    Args:
        cuts: the tensors.
        values: what they are for this replica's batch.
        samples: how many samples that has, a scalar.
        name: name of the operation, equal on all replicas.
        arguments: arguments of this replica that have a row a sample, each with the axis along which it has them.
        handles: resource tensors of variables, by which the messages come after others of the same names.
    """
    given = [
        (value, cut.axis) if cut.blocks == 1 else (blocks_swapped(by_block(value, cut.blocks)), 0)
        for cut, value in zip(cuts, values, strict=True)
        if cut.axis is not None
    ]
    found = iter(join_rows([*given, *arguments], samples, name, handles))
    joined = []
    for cut, value in zip(cuts, values, strict=True):
        of_all = value if cut.axis is None else next(found)
        joined.append(of_all if cut.blocks == 1 else in_a_row(blocks_swapped(of_all)))
    return [*joined, *found]


def join_rows(
    tensors: Sequence[tuple[tf.Tensor, int]], samples: Any, name: str, handles: Sequence[Any] = ()
) -> list[tf.Tensor]:
    """Returns tensors of the batch of all replicas: the rows of each replica, one after the other.

    Args:
        tensors: tensors of this replica's batch, each with the axis along which it has one row, or as many for each, of
            its samples.
        samples: how many there are, a scalar.
        name: name of the operation, equal on all replicas.
        handles: resource tensors of variables, by which the messages come after others of the same names.
    """
    running = runtime.current()
    if running.topology.replicas == 1:
        return [tensor for tensor, _ in tensors]
    fronts = [_moved(tensor, axis, 0) for tensor, axis in tensors]
    found: dict[int, tf.Tensor] = {}
    # One message takes all tensors of a type, side by side.
    for dtype in sorted({front.dtype for front in fronts}, key=lambda dtype: str(dtype.name)):
        alike = [number for number, front in enumerate(fronts) if front.dtype == dtype]
        rows = [tf.reshape(fronts[number], tf.stack([tf.cast(samples, tf.int32), -1])) for number in alike]
        widths = tf.stack([tf.shape(row)[1] for row in rows])
        group, named = running.process_sets.dp, f"{name}_{dtype.name}"
        of_all = collectives().all_gather(tf.concat(rows, 1), group, named, handles=handles)
        for number, part in zip(alike, tf.split(of_all, widths, axis=1, num=len(alike)), strict=True):
            shape = tf.concat([[-1], tf.shape(fronts[number])[1:]], 0)
            found[number] = _moved(tf.reshape(part, shape), 0, tensors[number][1])
    return [found[number] for number in range(len(tensors))]


def _moved(tensor: tf.Tensor, axis: int, to: int) -> tf.Tensor:
    """Returns a tensor whose axis comes in another place among the others."""
    if axis == to:
        return tensor
    order = list(range(tensor.shape.rank))
    order.insert(to, order.pop(axis))
    return tf.transpose(tensor, order)
