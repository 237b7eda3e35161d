"""Layers whose forward pass is made again in backward, in place of keeping what it made (activation checkpointing).

Layers that follow one another are joined into groups. Of every microbatch under way a stage keeps what passes from one
group to another; backward makes the tensors of a group again when its gradient arrives, and those of one group after
the other:

    forward     ■ a ■ b ■│■ c ■ d ■│■ e ■ f ■          │ kept, ■ made and forgotten
    backward                          ■ ■ ▶ ∂f ∂e
                            ■ ■ ▶ ∂d ∂c
                  ■ ■ ▶ ∂b ∂a

Small groups keep much between them, and a large one needs much while it is at work. The cut in between is that of Chen
et al., Training Deep Nets with Sublinear Memory Cost (2016), section 3, for layers of any sizes: of all cuts of the
order of the units, the one with which the sum of both is smallest, by dynamic programming under a bound for the largest
group, and over a few such bounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from smp_tf.partition.cost import Costs, Stash, seconds_of_nodes
from smp_tf.partition.op_graph import OpGraph, Tensor
from smp_tf.partition.units import Unit

#: Bounds for the largest group that are tried.
_BOUNDS = 24


def group_units(costs: Costs, in_flight: float) -> tuple[int, ...]:
    """The group of every unit.

    Args:
        costs: of the units.
        in_flight: of how many microbatches a stage keeps what passes between groups, times its share of the units.

    Returns:
        Numbers that ascend from 0.
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
    """By the first and last unit of a group, the bytes that later groups read of what it makes."""
    changes = np.zeros((count, count))
    for flow in costs.flows:
        if not flow.backward:
            changes[flow.producer, flow.producer] += flow.nbytes
            changes[flow.producer, max(flow.consumers)] -= flow.nbytes
    return _over_groups(changes)


def _working(costs: Costs, count: int) -> np.ndarray:
    """By the first and last unit of a group, the bytes that backward of the group reads of what it makes."""
    changes = np.zeros((count, count))
    for stash in costs.stashes:
        assert stash.producer is not None
        changes[stash.producer, max(stash.producer, min(stash.readers))] += stash.nbytes
    return _over_groups(changes)


def _over_groups(changes: np.ndarray) -> np.ndarray:
    """By the first and last unit of a group, a sum over its units.

    Args:
        changes: by unit, and by the last unit of the group, how much more or less the unit adds from that one on.
    """
    each = np.triu(np.cumsum(changes, axis=1))
    return np.cumsum(each[::-1], axis=0)[::-1]


def _cut(kept: np.ndarray, working: np.ndarray, bound: float) -> tuple[float, list[int]]:
    """The bytes kept, and the first unit of each group, of the cut that keeps least with no group above the bound."""
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
    """The groups without those whose backward follows their forward at once: what these made is still there.

    That is the last group of a chunk which holds one microbatch at most.

    Args:
        groups: of every unit.
        chunk_of: chunk of every unit.
        most_of_each: how many microbatches each chunk holds.

    Returns:
        The group of every unit; None for one whose tensors are kept.
    """
    last: dict[int, int] = {}
    for group, chunk in zip(groups, chunk_of, strict=True):
        last[chunk] = max(group, last.get(chunk, 0))
    return tuple(
        None if most_of_each[chunk] <= 1 and group == last[chunk] else group
        for group, chunk in zip(groups, chunk_of, strict=True)
    )


def groups_of_nodes(units: Sequence[Unit], groups: Sequence[int | None]) -> dict[int, int]:
    """The group of every forward and backward node that belongs to one.

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


def remade_nodes(graph: OpGraph, group_of: Mapping[int, int]) -> frozenset[int]:
    """The forward nodes whose results only backward of their own group needs, and that can run twice.

    What another group reads is kept for it, and so there for their own, too. What has an effect runs once, and what
    reads a variable that the step writes would read another value: the results of such nodes are kept as well.

    Args:
        graph: one microbatch of the step.
        group_of: group of nodes, forward and backward.
    """
    found: set[int] = set()
    for number in sorted(group_of, reverse=True):
        node = graph.nodes[number]
        if node.backward or node.stateful or node.writes or not all(graph.variables[v].read_only for v in node.reads):
            continue
        readers = {r for at in range(len(node.outputs)) for r in graph.consumers.get(Tensor(number, at), ())}
        groups = {group_of.get(r) for r in readers if graph.nodes[r].backward or r in found}
        if groups == {group_of[number]}:
            found.add(number)
    return frozenset(found)


def with_recompute(
    costs: Costs, graph: OpGraph, units: Sequence[Unit], groups: Sequence[int | None], unknown: int = 1
) -> Costs:
    """The costs where groups of units are made again: backward takes longer, and less is kept.

    Args:
        costs: where all is kept.
        graph: one microbatch of the step.
        units: its units.
        groups: the group of every unit; None for one whose tensors are kept.
        unknown: length assumed for dimensions that are only known when the step runs.
    """
    remade = remade_nodes(graph, groups_of_nodes(units, groups))
    seconds = seconds_of_nodes(graph, costs.machine, unknown)
    stashes = [
        dataclasses.replace(stash, readers=kept)
        for stash in costs.stashes
        if (kept := tuple(reader for reader in stash.readers if groups[reader] is None))
    ]
    for flow in costs.flows:
        readers = tuple(c for c in flow.consumers if groups[c] is not None and groups[c] != groups[flow.producer])
        if readers and not flow.backward:
            stashes.append(Stash(readers, flow.nbytes, flow.producer))
    stash_bytes = [0.0] * len(units)
    for stash in stashes:
        for reader in stash.readers:
            stash_bytes[reader] += stash.nbytes
    changed = []
    for unit, cost, kept_bytes in zip(units, costs.units, stash_bytes, strict=True):
        whole = sum(seconds[n] for n in unit.nodes)
        share = sum(seconds[n] for n in unit.nodes if n in remade) / whole if whole else 0.0
        again = cost.time_forward * share
        changed.append(
            dataclasses.replace(
                cost, time_backward=cost.time_backward + again, time_remade=again, stash_bytes=kept_bytes
            )
        )
    return dataclasses.replace(costs, units=tuple(changed), stashes=tuple(stashes), groups=tuple(groups))
