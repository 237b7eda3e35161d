"""The cost of every run of units: seconds, bytes stored and bytes sent.

    units   u0  u1  u2  u3  u4  u5  u6      entry [i, j] of a table: the run from unit i to unit j - 1
    runs    [───────)                       [0, 2)
                [───────────)               [1, 4)

A column holds all runs that end before unit j + 1, and follows from the column before it. When unit j joins, a tensor
that was made before the run and is read by j is received by exactly those runs that start after its previous reader,
and so on. Each record of a flow, a stash or a weight changes one slice of the column.

- time: compute, plus bytes received and sent. A message may count as some bytes more. A tensor that several stages
  need is received by each; the sender is charged for it once. The values and gradients of weights used on another stage
  cross once per step.
- memory: weights, gradients and slots of the variables it owns, copies of those it only uses, and
  as many stashes as the schedule keeps in flight on that stage.
- sent: what the run receives from other runs. Over all runs of a cut, that is what they send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from smp_tf.partition.place.placement import Chain
from smp_tf.partition.units.cost import Flow, Weight

Array = NDArray[np.float64]
UNREACHABLE = np.inf
#: How many units at least the ends of a tensor are apart that counts as far, and how many such tensors count.
_FAR, _MOST_FAR = 3, 8
#: Changes the runs of a column that start in a range by an amount, when a unit joins.
_When = Callable[[int, Array, int, int, float], None]


class RunCosts:
    """Cost of every run of units: entry [i, j] is the run from unit i to unit j - 1.

    Args:
        chain: the units.
        late: shared variables owned by their last user.
        microbatches: over which the copies of a step are spread.
    """

    def __init__(self, chain: Chain, late: frozenset[int], microbatches: int) -> None:
        self.count = count = len(chain.names)
        # Columns are written one after the other, so each lies in one piece of memory.
        shape = count + 1, count + 1
        self.compute = np.full(shape, UNREACHABLE, order="F")
        self.moved, self.weights, self.stash, self.sent = (np.zeros(shape, order="F") for _ in range(4))
        joins: list[list[tuple[Array, int, int, float]]] = [[] for _ in range(count)]
        columns = traffic, received, stored, kept = [np.zeros(count) for _ in range(4)]

        def when(unit: int, column: Array, low: int, high: int, amount: float) -> None:
            joins[unit].append((column, low, high, amount))

        _add_received(chain, received, joins, microbatches)
        for flow in chain.flows:
            _add_flow(flow, chain.bytes_of(flow), traffic, when)
        for stash in chain.stashes:
            _with_any(kept, stash.readers, stash.nbytes, when)
        for weight in chain.weights:
            crossing = chain.bytes_across(weight) / microbatches
            _add_weight(weight, columns, when, is_late=weight.variable in late, crossing=crossing)
        total = np.concatenate([[0.0], np.cumsum(np.asarray(chain.times, np.float64))])
        for end in range(1, count + 1):
            for column, low, high, amount in joins[end - 1]:
                column[low:high] += amount
            self.compute[:end, end] = total[end] - total[:end]
            self.moved[:end, end] = traffic[:end] * chain.seconds_per_byte
            self.sent[:end, end] = received[:end]
            self.weights[:end, end] = stored[:end]
            self.stash[:end, end] = kept[:end]

    @classmethod
    def of(cls, chain: Chain, late: frozenset[int], microbatches: int) -> RunCosts:
        """Returns the costs of a chain's runs, computed once.

        Args:
            chain: the units.
            late: shared variables owned by their last user.
            microbatches: over which the copies of a step are spread.
        """
        if (late, microbatches) not in chain.kept:
            chain.kept[late, microbatches] = cls(chain, late, microbatches)
        found = chain.kept[late, microbatches]
        assert isinstance(found, RunCosts)
        return found


def far_tensors(chain: Chain, microbatches: int, chunks: int) -> dict[tuple[int, tuple[int, ...]], float]:
    """Returns the bytes per step of tensors that may pass whole chunks, by who makes and who reads them.

    Such a tensor may be read by two chunks of a stage, or on the stage that makes it. Costs of runs do not know that.
    Only the largest of these tensors are returned, since each takes time for every cut.

    Args:
        chain: the units.
        microbatches: per step.
        chunks: number of chunks.
    """
    far = max(_FAR, len(chain.names) // (2 * chunks))
    found: dict[tuple[int, tuple[int, ...]], float] = {}
    for flow in chain.flows:
        ends = (flow.producer, *flow.consumers)
        if max(ends) - min(ends) >= far:
            at = flow.producer, flow.consumers
            found[at] = found.get(at, 0.0) + flow.nbytes * microbatches
    largest = sorted(found, key=lambda at: (-found[at], at))[:_MOST_FAR]
    return {at: found[at] for at in largest}


def _with_any(column: Array, units: Sequence[int], amount: float, when: _When, after: int = -1) -> None:
    """Changes the runs that hold any of the units, and start after `after`."""
    for unit in units:
        if unit > after:
            when(unit, column, after + 1, unit + 1, amount)
            after = unit


def _add_flow(flow: Flow, nbytes: float, traffic: Array, when: _When) -> None:
    """Adds the bytes that runs receive and send of one tensor, as many as it counts.

    forward   p ──▶ c1 ──▶ c2      received by runs that start after p and hold a reader;
                                   sent by runs that hold p and end before c2
    backward  c1 ◀── c2 ◀── p      received by runs that end before p and hold a reader;
                                   sent by runs that hold p and start after c1
    """
    ahead = [c for c in flow.consumers if c > flow.producer]
    behind = [c for c in flow.consumers if c < flow.producer]
    if ahead:
        _with_any(traffic, ahead, nbytes, when, after=flow.producer)
        when(flow.producer, traffic, 0, flow.producer + 1, nbytes)
        when(ahead[-1], traffic, 0, flow.producer + 1, -nbytes)
    if behind:
        _with_any(traffic, behind, nbytes, when)
        when(flow.producer, traffic, 0, behind[-1] + 1, -nbytes)
        when(flow.producer, traffic, behind[0] + 1, flow.producer + 1, nbytes)


def _add_received(
    chain: Chain, received: Array, joins: Sequence[list[tuple[Array, int, int, float]]], microbatches: int
) -> None:
    """Adds the bytes that runs receive in a whole step, which are whole numbers and add up exactly.

    A tensor is received by runs that hold a reader and not its producer. A weight is received by runs that hold a user
    and not its first one: its value, or its gradient.

    Args:
        chain: the units.
        received: the column.
        joins: for each unit, the changes to columns when it joins.
        microbatches: per step.
    """
    moved = [(flow.producer, flow.consumers, flow.nbytes * microbatches) for flow in chain.flows]
    moved += [(weight.users[0], weight.users[1:], weight.crossing) for weight in chain.weights if len(weight.users) > 1]
    for producer, readers, nbytes in moved:
        after = -1
        for unit in readers:
            if unit > producer > after:
                if after >= 0:
                    # Runs that hold the producer and a reader before it were counted, and receive nothing.
                    joins[producer].append((received, 0, after + 1, -nbytes))
                after = producer
            joins[unit].append((received, after + 1, unit + 1, nbytes))
            after = unit
        if -1 < after < producer:
            joins[producer].append((received, 0, after + 1, -nbytes))


def _add_weight(weight: Weight, columns: Sequence[Array], when: _When, *, is_late: bool, crossing: float) -> None:
    """Adds what runs store of a weight, and what crosses of it where several runs use it.

    Args:
        weight: the weight.
        columns: of traffic, of bytes received, of bytes stored, and of bytes kept.
        when: changes a column when a unit joins.
        is_late: whether its last user owns it, and not its first.
        crossing: bytes per microbatch that it counts between its owner and another stage.
    """
    traffic, _, stored, _ = columns
    first, last = weight.users[0], weight.users[-1]
    owner = last if is_late else first
    _with_any(stored, weight.users, weight.copied, when)
    when(owner, stored, 0, owner + 1, weight.stored - weight.copied)
    if len(weight.users) > 1:
        # The owner sends the value and receives the gradient. Each other stage receives the value and sends the
        # gradient.
        _with_any(traffic, weight.users, crossing, when)
        when(last, traffic, 0, first + 1, -crossing)
