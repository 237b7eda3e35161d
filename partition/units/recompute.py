"""Runs the forward pass of layers again in backward, instead of keeping its tensors (activation checkpointing).

Consecutive layers are joined into groups. For every microbatch under way, a stage keeps what passes from one group to
another. Backward makes the tensors of a group again when the group's gradient arrives, one group after the other:

    forward     ■ a ■ b ■│■ c ■ d ■│■ e ■ f ■          │ kept, ■ made and forgotten
    backward                          ■ ■ ▶ ∂f ∂e
                            ■ ■ ▶ ∂d ∂c
                  ■ ■ ▶ ∂b ∂a

Many small groups keep much between them. A large group needs much while its backward runs. The cut that is chosen makes
the sum of both smallest, over all cuts of the order of the units. Dynamic programming finds it, under a few bounds for
the largest group in turn. It is the cut of Chen et al., Training Deep Nets with Sublinear Memory Cost (2016), section
3, for layers of any sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from smp_tf.partition.graph.op_graph import OpGraph, Tensor
from smp_tf.partition.graph.op_kinds import SUM_OVER_REPLICAS
from smp_tf.partition.units.cost import Costs, Flow, Stash
from smp_tf.partition.units.units import Unit

#: Bounds for the largest group that are tried.
_BOUNDS = 24


def group_units(costs: Costs, in_flight: float) -> tuple[int, ...]:
    """Returns the group of every unit.

    Args:
        costs: costs of the units.
        in_flight: for how many microbatches a stage keeps what passes between groups, times its share of the units.

    Returns:
        A number for each unit, ascending from 0.
    """
    count = len(costs.units)
    if not count:
        return ()
    kept, working = _kept(costs, count), _working(costs, count)
    smallest, largest = max(working[i, i] for i in range(count)), max(1.0, working[0, count - 1])
    found: list[tuple[float, list[int]]] = []
    for bound in np.geomspace(max(1.0, smallest), max(1.0, smallest, largest), _BOUNDS):
        total, begins = _cut(kept, working, bound * (1 + 1e-9))
        ends = [*begins[1:], count]
        at_work = max(working[begin, end - 1] for begin, end in zip(begins, ends, strict=True))
        found.append((in_flight * total + at_work, begins))
    begins = min(found, key=lambda each: each[0])[1]
    return tuple(int(np.searchsorted(begins, unit, side="right")) - 1 for unit in range(count))


def _kept(costs: Costs, count: int) -> np.ndarray:
    """Returns, by the first and last unit of a group, the bytes of the group that later groups read."""
    changes = np.zeros((count, count))
    for flow in costs.flows:
        if not flow.backward:
            changes[flow.producer, flow.producer] += flow.nbytes
            changes[flow.producer, max(flow.consumers)] -= flow.nbytes
    return _over_groups(changes)


def _working(costs: Costs, count: int) -> np.ndarray:
    """Returns, by the first and last unit of a group, the bytes of the group that its own backward reads."""
    changes = np.zeros((count, count))
    for stash in costs.stashes:
        assert stash.producer is not None
        changes[stash.producer, max(stash.producer, min(stash.readers))] += stash.nbytes
    return _over_groups(changes)


def _over_groups(changes: np.ndarray) -> np.ndarray:
    """Returns, by the first and last unit of a group, a sum over its units.

    Args:
        changes: by unit and by the last unit of the group, how much more or less the unit adds from that last unit on.
    """
    each = np.triu(np.cumsum(changes, axis=1))
    return np.cumsum(each[::-1], axis=0)[::-1]


def _cut(kept: np.ndarray, working: np.ndarray, bound: float) -> tuple[float, list[int]]:
    """Returns the cut that keeps least with no group above the bound, as the bytes kept and each group's first unit."""
    count = len(kept)
    best, source = np.full(count + 1, np.inf), np.zeros(count + 1, int)
    best[0] = 0.0
    for last in range(count):
        costs = np.where(working[: last + 1, last] <= bound, best[: last + 1] + kept[: last + 1, last], np.inf)
        source[last + 1] = int(np.argmin(costs))
        best[last + 1] = costs[source[last + 1]]
    begins, end = [], count
    while end > 0:
        end = int(source[end])
        begins.append(end)
    return float(best[count]), begins[::-1]


def needed_again(groups: Sequence[int], chunk_of: Sequence[int], most_of_each: Sequence[int]) -> tuple[int | None, ...]:
    """Returns the groups, without any that is alone in a chunk that holds one microbatch at most.

    Making such a group again would free nothing, since its backward needs all of it at once and nothing else is kept.

    Args:
        groups: the group of every unit.
        chunk_of: the chunk of every unit.
        most_of_each: how many microbatches each chunk holds.

    Returns:
        The group of every unit; None for one whose tensors are kept.
    """
    of_chunk: dict[int, set[int]] = {}
    for group, chunk in zip(groups, chunk_of, strict=True):
        of_chunk.setdefault(chunk, set()).add(group)
    return tuple(
        None if most_of_each[chunk] <= 1 and len(of_chunk[chunk]) == 1 else group
        for group, chunk in zip(groups, chunk_of, strict=True)
    )


def groups_of_nodes(units: Sequence[Unit], groups: Sequence[int | None]) -> dict[int, int]:
    """Returns the group of every forward and backward node that belongs to one.

    Args:
        units: of the step.
        groups: the group of every unit, or None.
    """
    return {
        number: group
        for unit, group in zip(units, groups, strict=True)
        if group is not None
        for number in (*unit.nodes, *unit.backward)
    }


def remade_nodes(graph: OpGraph, group_of: Mapping[int, int], kept: Collection[int] = ()) -> frozenset[int]:
    """Returns the forward nodes that can run twice and whose results only their own group's backward needs.

    A result that another group reads is kept, and so the own group's backward has it, too. An op with an effect must
    run once, and so must a sum over the replicas. An op that reads a variable which the step writes would read another
    value the second time. The results of such nodes are kept as well.

    Args:
        graph: one microbatch of the step.
        group_of: the group of each node, forward and backward.
        kept: nodes whose results are kept for others.
    """
    found: set[int] = set()
    for number in sorted(group_of, reverse=True):
        node = graph.nodes[number]
        if (
            number in kept
            or node.backward
            or node.stateful
            or node.op == SUM_OVER_REPLICAS
            or node.writes
            or not all(graph.variables[v].read_only for v in node.reads)
        ):
            continue
        groups = {group_of.get(r) for r in graph.data_to[number] if graph.nodes[r].backward or r in found}
        if groups == {group_of[number]}:
            found.add(number)
    return frozenset(found)


def with_recompute(costs: Costs, graph: OpGraph, units: Sequence[Unit], groups: Sequence[int | None]) -> Costs:
    """Returns the costs when groups of units are made again: backward takes longer, and less is kept.

    Two things are not counted: the inputs of a chunk that begins within a group and, where backward is cut in two, what
    the first half makes again for the second.

    Args:
        costs: the costs when all is kept.
        graph: one microbatch of the step.
        units: its units.
        groups: the group of every unit; None for one whose tensors are kept.
    """
    group_of = groups_of_nodes(units, groups)
    remade = remade_nodes(graph, group_of)
    unit_of = {number: unit.index for unit in units for number in unit.nodes}
    readers: dict[Tensor, set[int]] = {}
    records: dict[Tensor, Flow | Stash] = {}
    for stash in costs.stashes:
        assert stash.tensor is not None
        if stash.tensor.node not in remade:
            readers.setdefault(stash.tensor, set()).update(stash.readers)
            records[stash.tensor] = stash
    for flow in costs.flows:
        if flow.backward:
            continue
        assert flow.tensor is not None
        again = {unit_of[r] for r in graph.consumers.get(flow.tensor, ()) if r in remade}
        again = {unit for unit in again if groups[unit] != groups[flow.producer]}
        if again:
            readers.setdefault(flow.tensor, set()).update(again)
            records.setdefault(flow.tensor, flow)
    stashes = tuple(
        Stash(tuple(sorted(readers[tensor])), record.nbytes, record.producer, tensor)
        for tensor, record in sorted(records.items())
    )
    stash_bytes = [0.0] * len(units)
    for stash in stashes:
        for reader in stash.readers:
            stash_bytes[reader] += stash.nbytes
    changed = []
    for unit, cost, kept_bytes in zip(units, costs.units, stash_bytes, strict=True):
        whole = sum(costs.node_seconds[n] for n in unit.nodes)
        share = sum(costs.node_seconds[n] for n in unit.nodes if n in remade) / whole if whole else 0.0
        once_more = cost.seconds.forward * share
        seconds = dataclasses.replace(cost.seconds, backward=cost.seconds.backward + once_more, remade=once_more)
        nbytes = dataclasses.replace(cost.nbytes, stash=kept_bytes)
        changed.append(dataclasses.replace(cost, seconds=seconds, nbytes=nbytes))
    return dataclasses.replace(costs, units=tuple(changed), stashes=stashes, groups=tuple(groups))
