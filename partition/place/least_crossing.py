"""Says how few bytes any placement sends at least, by the units whose stages are all but given.

    first and last stage of units, by stage_limits      0    0    0-1   0-1    1-2    2
                                                        a ─▶ b ─▶ c ─▶ d ───▶ e ───▶ f
    between stages 0 and 1                              b is before the border, e is not: the least cut between them

For each border, the units that may be on either side of it, and no other, are open. Those before it are on its first
side, those after it on its second. A tensor counts there if what makes it and what reads it are on these two stages.
The minimum cut between the two sides is the least that crosses. What surely crosses between other stages is added.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import networkx as nx

from smp_tf.partition.place.placement import Chain
from smp_tf.partition.units.cost import Weight

#: The points of a network for what is surely before a border, and for what is surely after it.
_BEFORE, _AFTER = "before", "after"


def least_crossing(
    chain: Chain,
    needs: Sequence[tuple[int, int]],
    within: tuple[Sequence[int], Sequence[int]],
    stages: int,
    microbatches: int,
) -> float:
    """Returns a number of bytes per microbatch below which no placement sends.

    Args:
        chain: the units with their costs.
        needs: pairs of units. The second one needs something of the first.
        within: the first and the last stage that every unit may be on.
        stages: number of stages.
        microbatches: over which the copies of a step are spread.

    Example:
        >>> chain = Chain(("a", "b", "c"), (1.0,) * 3, (Flow(0, (1,), 9.0), Flow(1, (2,), 4.0)))
        >>> least_crossing(chain, [(0, 1), (1, 2)], ([0, 0, 1], [0, 1, 1]), 2, 1)
        4.0
    """
    at_borders = sum(_at_border(chain, needs, within, border, microbatches) for border in range(stages - 1))
    return at_borders + _far_apart(chain, within, microbatches)


def _far_apart(chain: Chain, within: tuple[Sequence[int], Sequence[int]], microbatches: int) -> float:
    """Returns what surely crosses and counts at no border: between stages that are not next to each other."""
    first, last = within
    found = 0.0
    for flow in chain.flows:
        low, high = first[flow.producer] - 1, last[flow.producer] + 1
        surely = {first[unit] for unit in flow.consumers if first[unit] == last[unit]}
        found += flow.nbytes * sum(not low <= stage <= high for stage in surely)
    for weight in chain.weights:
        found += weight.crossing / microbatches * max(0, len(_surely_used(weight, within)) - 1)
    return found


def _surely_used(weight: Weight, within: tuple[Sequence[int], Sequence[int]]) -> set[int]:
    """Returns the stages that surely use a weight."""
    return {within[0][unit] for unit in weight.users if within[0][unit] == within[1][unit]}


def _at_border(
    chain: Chain,
    needs: Sequence[tuple[int, int]],
    within: tuple[Sequence[int], Sequence[int]],
    border: int,
    microbatches: int,
) -> float:
    """Returns the least bytes that cross the border after a stage, of tensors that are at no other border."""
    first, last = within
    network = nx.DiGraph()
    network.add_nodes_from((_BEFORE, _AFTER))

    def point_of(unit: int) -> Hashable | None:
        """Returns the point of a unit that is on one of the two stages next to the border; None of any other."""
        if first[unit] < border or last[unit] > border + 1:
            return None
        if last[unit] == border:
            return _BEFORE
        return _AFTER if first[unit] == border + 1 else unit

    for flow in chain.flows:
        made, read = point_of(flow.producer), [point_of(unit) for unit in flow.consumers]
        known = [point for point in read if point is not None]
        if made is not None and {made, *known} != {made}:
            _add_tensor(network, made, known, flow.nbytes)
    for weight in chain.weights:
        if len(weight.users) < 2 or len(_surely_used(weight, within)) > 1:
            continue
        used = [point for unit in weight.users if (point := point_of(unit)) is not None]
        if len({*used}) > 1:
            _add_tensor(network, used[0], used[1:], weight.crossing / microbatches)
    for before, after in needs:
        one, other = point_of(before), point_of(after)
        if one is not None and other is not None:
            # What is needed is not after the border where what needs it is before.
            network.add_edge(other, one)
    return float(nx.minimum_cut_value(network, _BEFORE, _AFTER))


def _add_tensor(network: nx.DiGraph, made: Hashable, read: Sequence[Hashable], nbytes: float) -> None:
    """Adds a tensor that crosses once, however many read it: where some are on the other side than its maker."""
    ahead, behind = ("ahead", len(network)), ("behind", len(network))
    network.add_edge(made, ahead, capacity=nbytes)
    network.add_edge(behind, made, capacity=nbytes)
    for point in read:
        # An edge without a capacity may carry anything.
        network.add_edge(ahead, point)
        network.add_edge(point, behind)
