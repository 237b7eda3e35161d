"""Makes ops that make layers again in backward wait for the gradient that comes into their group.

    group 1      ■ ■ ▶ ∂d ∂c ─┐ gradient
                              │
    group 0      ■ ■ ◀────────┤ what has no other input to wait for
                  └───▶ ∂b ∂a ◀┘

Without this, all groups of a segment would be made again as soon as it begins, and be in memory together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from smp_tf.partition.graph.op_graph import SOURCES, OpGraph, Tensor
from smp_tf.partition.graph.op_kinds import NO_MEMORY_OPS
from smp_tf.partition.split.assign import Place, Role


def waits_of_groups(
    graph: OpGraph,
    places: Sequence[Place],
    nodes: Collection[int],
    own: Collection[int],
    taken: Collection[Tensor],
    group_of: Mapping[int, int],
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Returns the nodes of a backward segment that wait, each with the nodes that it waits for.

    Args:
        graph: the op graph.
        places: places of all its nodes.
        nodes: nodes of the segment.
        own: nodes that are at home in the segment.
        taken: tensors that the segment is given.
        group_of: group of the nodes, forward and backward, of layers that are made again.
    """
    members, inside = sorted(nodes), frozenset(own)
    readers: dict[int, list[int]] = defaultdict(list)
    for number in members:
        for tensor in graph.nodes[number].inputs:
            if tensor not in taken:
                readers[tensor.node].append(number)
        for before in graph.nodes[number].control:
            readers[before].append(number)
    again, backward = _by_group(graph, places, members, readers, group_of)
    found: dict[int, tuple[int, ...]] = {}
    for group in sorted(again, reverse=True):
        copies = again[group]
        first = [n for n in sorted(copies) if not any(t.node in copies for t in graph.nodes[n].inputs)]
        given = (t.node for n in backward[group] for t in graph.nodes[n].inputs)
        entering = {number for number in given if number in inside and group_of.get(number) != group}
        # A gradient that itself waits for the group cannot be waited for. It may do so where layers share a gradient.
        waited_for = tuple(sorted(entering - _behind(first, readers)))
        if waited_for:
            found.update((number, waited_for) for number in first)
            for number in waited_for:
                readers[number].extend(first)
    return tuple(sorted(found.items()))


def _behind(first: Sequence[int], readers: Mapping[int, Sequence[int]]) -> set[int]:
    """Returns some nodes and all nodes that come after them."""
    reached, stack = set(first), list(first)
    while stack:
        for reader in readers.get(stack.pop(), ()):
            if reader not in reached:
                reached.add(reader)
                stack.append(reader)
    return reached


def _by_group(
    graph: OpGraph,
    places: Sequence[Place],
    members: Sequence[int],
    readers: Mapping[int, Sequence[int]],
    group_of: Mapping[int, int],
) -> tuple[dict[int, set[int]], dict[int, list[int]]]:
    """Returns what a segment makes again, by group, and the backward nodes of each group.

    A group also has the nodes that are made anew anyway and that only it reads, such as the random numbers of its
    dropout, or weights that are cast for it.
    """
    again: dict[int, set[int]] = defaultdict(set)
    backward: dict[int, list[int]] = defaultdict(list)
    of: dict[int, int | None] = {}
    for number in reversed(members):
        node, place = graph.nodes[number], places[number]
        group = group_of.get(number)
        is_copy = place.role is Role.HOME and place.sweep == 0
        if place.role in (Role.FREE, Role.WEIGHT) and node.op not in SOURCES and node.op not in NO_MEMORY_OPS:
            groups = {of.get(reader) for reader in readers.get(number, ())}
            group, is_copy = (groups.pop() if len(groups) == 1 else None), True
        of[number] = group
        if group is not None and is_copy:
            again[group].add(number)
        elif group is not None and place.role is Role.HOME:
            backward[group].append(number)
    return again, backward
