"""Says how few bytes any placement sends at least, by the units whose stages are all but given.

    first and last stage of units, by stage_limits      0    0    0-1   0-1    1-2    2
                                                        a ─▶ b ─▶ c ─▶ d ───▶ e ───▶ f
    between stages 0 and 1                              b is before the border, e is not: the least cut between them

For each border, the units that may be on either side of it, and no other, are open. Those before it are on its first
side, those after it on its second. A tensor counts there if what makes it and what reads it are on these two stages. A
flow of water from side to side shows the least that crosses, by whichever way. What surely crosses between other stages
is added.

Source:
    Dinic's algorithm for the largest flow, which is as large as the smallest cut.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from smp_tf.partition.place.placement import Chain
from smp_tf.partition.units.cost import Weight


@dataclass
class _Network:
    """Pipes between points, each with what can still flow through it.

    Args:
        pipes: for each point, the numbers of the pipes from it. The pipe back has the other number of a pair.
        ends: where each pipe ends.
        room: what can still flow through each pipe.
    """

    pipes: list[list[int]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    room: list[float] = field(default_factory=list)

    def point(self) -> int:
        """Adds a point."""
        self.pipes.append([])
        return len(self.pipes) - 1

    def pipe(self, begin: int, end: int, room: float) -> None:
        """Adds a pipe."""
        for one, other, free in ((begin, end, room), (end, begin, 0.0)):
            self.pipes[one].append(len(self.ends))
            self.ends.append(other)
            self.room.append(free)

    def largest_flow(self, source: int, sink: int) -> float:
        """Returns how much can flow from one point to another."""
        total = 0.0
        while True:
            far = self._distances(source)
            if far[sink] < 0:
                return total
            following = [0] * len(self.pipes)
            while pushed := self._push(source, sink, far, following):
                total += pushed

    def _distances(self, source: int) -> list[int]:
        far = [-1] * len(self.pipes)
        far[source] = 0
        waiting = deque([source])
        while waiting:
            at = waiting.popleft()
            for pipe in self.pipes[at]:
                end = self.ends[pipe]
                if self.room[pipe] > 0 and far[end] < 0:
                    far[end] = far[at] + 1
                    waiting.append(end)
        return far

    def _push(self, source: int, sink: int, far: Sequence[int], following: list[int]) -> float:
        """Lets as much flow through one way of shortest length as there is room, and returns how much."""
        way: list[int] = []
        at = source
        while at != sink:
            while following[at] < len(self.pipes[at]):
                pipe = self.pipes[at][following[at]]
                if self.room[pipe] > 0 and far[self.ends[pipe]] == far[at] + 1:
                    break
                following[at] += 1
            else:
                if not way:
                    return 0.0
                # No way on: the pipe that led here is done with.
                at = self.ends[way.pop() ^ 1]
                following[at] += 1
                continue
            way.append(pipe)
            at = self.ends[pipe]
        pushed = min(self.room[pipe] for pipe in way)
        for pipe in way:
            self.room[pipe] -= pushed
            self.room[pipe ^ 1] += pushed
        return pushed


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
    network = _Network()
    source, sink = network.point(), network.point()
    points: dict[int, int] = {}

    def point_of(unit: int) -> int | None:
        """Returns the point of a unit that is on one of the two stages next to the border; None of any other."""
        if first[unit] < border or last[unit] > border + 1:
            return None
        if last[unit] == border:
            return source
        if first[unit] == border + 1:
            return sink
        if unit not in points:
            points[unit] = network.point()
        return points[unit]

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
            network.pipe(other, one, math.inf)
    return network.largest_flow(source, sink)


def _add_tensor(network: _Network, made: int, read: Sequence[int], nbytes: float) -> None:
    """Adds a tensor that crosses once, however many read it: where some are on the other side than its maker."""
    ahead, behind = network.point(), network.point()
    network.pipe(made, ahead, nbytes)
    network.pipe(behind, made, nbytes)
    for point in read:
        network.pipe(ahead, point, math.inf)
        network.pipe(point, behind, math.inf)
