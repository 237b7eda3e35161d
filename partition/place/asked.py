"""What is to be placed and how far to look, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from smp_tf.partition.place.placement import Chain, Chunks, Placement, Ranks
from smp_tf.partition.place.solve_chain import MOST_SHARED_GROUPS, TOLERANCE
from smp_tf.partition.place.solve_dag import MOST_CHOICES, DagProblem
from smp_tf.partition.place.trade import Trade


@dataclass(frozen=True)
class Placed:
    """A placement, and what is proved about it.

    Args:
        placement: the stages of the units.
        gap: by how much the score of any other placement can be smaller, as a share of this one's score. Placements
            that disregard what a script has put on stages count, too. None where an earlier step has placed some of the
            units.
        without: why the solver that could have proved more was not used; None where it was, or was not needed.
        trade: what the placement gives up in balance for fewer bytes sent; None where it is the best balanced one. The
            gap is that of the best balanced one in any case.
    """

    placement: Placement
    gap: float | None
    without: str | None = None
    trade: Trade | None = None


@dataclass(frozen=True)
class Effort:
    """How far to look beyond the best balanced cut of one order.

    Args:
        seconds: about how long to search for placements beyond cuts. They are counted the same on every run and
            machine.
        worth: the least gain that is worth a search, in seconds of a step or in bytes.
        most_choices: the number of units times stages above which there is no search.
        tolerance: the share by which the balance may be worse than the best, so that fewer bytes are sent; 0 for the
            best balance.
        worth_sent: the bytes sent per microbatch that are worth a search for a placement that sends fewer.
    """

    seconds: float = 0.0
    worth: float = 0.0
    most_choices: int = MOST_CHOICES
    tolerance: float = 0.0
    worth_sent: float = 0.0


@dataclass(frozen=True)
class Asked:
    """What is to be placed, and by which rules.

    Args:
        chain: the units in topological order, their costs, and the stages that are given.
        pairs: pairs of units. The second one needs something of the first.
        objective: "speed" or "memory".
        microbatches: per step.
        ranks: how these differ, and what they may need.
        chunks: where they are, and what stages keep of them.
    """

    chain: Chain
    pairs: tuple[tuple[int, int], ...]
    objective: str
    microbatches: int
    ranks: Ranks
    chunks: Chunks

    @property
    def is_pinned(self) -> bool:
        """Returns whether an earlier step has placed some of the units."""
        return any(at is not None for at in self.chain.pinned)

    @property
    def is_by_hand(self) -> bool:
        """Returns whether a script has placed some of the units."""
        return any(at is not None for at in self.chain.manual)

    @property
    def leaves_no_choice(self) -> bool:
        """Returns whether a script, or an earlier step, has placed all units."""
        given = zip_longest(self.chain.manual, self.chain.pinned, fillvalue=None)
        return (self.is_pinned or self.is_by_hand) and all(pair != (None, None) for pair in given)

    @property
    def is_only_order(self) -> bool:
        """Returns whether each unit needs the one before it, and cuts are searched with every owner of a weight."""
        follows = set(self.pairs)
        shared = [weight.users for weight in self.chain.weights if len(weight.users) > 1]
        every_owner = len(set(shared)) == len(shared) <= MOST_SHARED_GROUPS and all(len(users) == 2 for users in shared)
        return every_owner and all((at, at + 1) in follows for at in range(len(self.chain.names) - 1))

    @property
    def tolerance(self) -> float:
        """Returns the share by which a placement may be above the best score."""
        return near(self.objective, self.chunks.stages, self.microbatches)

    @property
    def problem(self) -> DagProblem:
        """Returns the same for the solver that looks at any order."""
        held = self.chunks.in_flight
        return DagProblem(
            self.chain, self.pairs, self.chunks.stages, self.objective, self.microbatches, held, self.ranks
        )

    def is_too_large(self, effort: Effort) -> bool:
        """Returns whether there are more choices than a solver is to search."""
        return len(self.chain.names) * self.chunks.stages > effort.most_choices

    def score(self, placement: Placement) -> float:
        """Returns the score of a placement, which is to be as small as possible."""
        return placement.score(self.objective, self.microbatches)


def near(objective: str, stages: int, microbatches: int) -> float:
    """Returns the share by which a placement may be above the best score and still be taken, since costs are estimates.

    Args:
        objective: "speed" or "memory".
        stages: number of stages.
        microbatches: per step.
    """
    others = microbatches - 1
    if objective == "memory" or not others:
        return TOLERANCE
    # A step takes all stages once, and the slowest stage for the other microbatches. So the slowest stage has at least
    # this share of the time, and the whole is within 1 %.
    return min(TOLERANCE, 0.01 * others / (others + stages))
