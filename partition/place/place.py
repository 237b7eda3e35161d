"""Places the units of a step, by the best cut of one order or better, and says how much better any placement can be.

    units in one order ──▶ solve_chain: the best cut ──▶ is no other order possible? done
                                                    ├──▶ stage_limits: is no placement much better? done
                                                    └──▶ solve_dag: the best placement in any order, or a bound

A model whose layers follow one another has only one order, and its best cut is the best placement. Where a model has
branches, a placement may put one branch next to the other in a way that no cut of one order does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from smp_tf.partition.errors import MemoryLimitError, PlacementError
from smp_tf.partition.place.placement import Chain, Chunks, Placement, Ranks, in_flight_of
from smp_tf.partition.place.solve_chain import MOST_SHARED_GROUPS, TOLERANCE, ChainSolution, solve_chain
from smp_tf.partition.place.solve_chunks import looks_at_all, solve_chunks
from smp_tf.partition.place.solve_dag import MOST_CHOICES, DagProblem, solve_dag
from smp_tf.partition.place.stage_limits import MOST_UNITS, StageLimits


@dataclass(frozen=True)
class Placed:
    """A placement, and what is proved about it.

    Args:
        placement: the stages of the units.
        gap: by how much the score of any other placement can be smaller, as a share of this one's score. Placements
            that disregard what a script has put on stages count, too. None where an earlier step has placed some of the
            units.
        without: why the solver that could have proved more was not used; None where it was, or was not needed.
    """

    placement: Placement
    gap: float | None
    without: str | None = None


@dataclass(frozen=True)
class Effort:
    """How long to search for placements beyond cuts of one order.

    Args:
        seconds: about how long to search. They are counted the same on every run and machine.
        worth: the least gain that is worth a search, in seconds of a step or in bytes.
        most_choices: the number of units times stages above which there is no search.
    """

    seconds: float = 0.0
    worth: float = 0.0
    most_choices: int = MOST_CHOICES


@dataclass(frozen=True)
class _Asked:
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


def place(
    chain: Chain,
    needs: Iterable[tuple[int, int]],
    stages: int,
    *,
    objective: str = "memory",
    microbatches: int = 1,
    ranks: Ranks | None = None,
    effort: Effort = Effort(),
    chunks: Chunks | None = None,
) -> Placed:
    """Places units on exactly `stages` stages, none empty.

    Args:
        chain: the units in topological order, their costs, and the stages that are given.
        needs: pairs of units. The second one needs something of the first.
        stages: number of stages.
        objective: "speed": the seconds of a step; "memory": the bytes of the fullest stage.
        microbatches: per step.
        ranks: how these differ, and what they may need; None where they are alike and may need anything.
        effort: how far to look beyond cuts of one order.
        chunks: where they are, and what stages keep of them; None for one on every stage, and what 1F1B keeps. Where a
            stage has several, only cuts of one order are searched.

    Returns:
        The placement.

    Raises:
        PlacementError: there are fewer units than stages, or manual placements are not in order.
        MemoryLimitError: no cut keeps within what ranks may need, and no other placement was found that does.

    Example:
        >>> place(Chain(("a", "b", "c"), (1.0, 2.0, 3.0)), [(0, 1), (1, 2)], 2, objective="speed").gap
        0.0
    """
    chunks = chunks or Chunks.one_each(in_flight_of(stages, microbatches, None))
    pairs = tuple(sorted(set(needs)))
    asked = _Asked(chain, pairs, objective, microbatches, ranks or Ranks.alike(stages), chunks)
    if not chunks.are_stages:
        return _in_chunks(asked)
    try:
        cut = solve_chain(
            chain,
            stages,
            objective=objective,
            microbatches=microbatches,
            in_flight=chunks.in_flight,
            ranks=asked.ranks,
            tolerance=asked.tolerance,
        )
    except MemoryLimitError:
        if asked.is_pinned or asked.is_by_hand or effort.seconds <= 0 or asked.is_too_large(effort):
            raise
        beside = _where_no_cut_fits(asked, effort.seconds)
        if beside is None:
            raise
        return beside
    if asked.is_pinned:
        return Placed(cut, None)
    if asked.is_by_hand:
        return Placed(cut, _gap(asked.score(cut), _least_without_hand(asked)))
    return _better_than(cut, asked, effort)


def _in_chunks(asked: _Asked) -> Placed:
    """Returns the best cut where stages have several chunks."""
    chain, chunks = asked.chain, asked.chunks
    cut = solve_chunks(chain, chunks, objective=asked.objective, microbatches=asked.microbatches, ranks=asked.ranks)
    score = asked.score(cut)
    bound = _least_possible(asked)
    if not asked.is_by_hand and looks_at_all(chain, chunks) and _is_only_order(chain, asked.pairs):
        bound = score
    return Placed(cut, None if asked.is_pinned else _gap(score, bound))


def _better_than(cut: ChainSolution, asked: _Asked, effort: Effort) -> Placed:
    """Returns a placement that is better than the best cut of one order, or that cut with what is proved about it."""
    chain, score, bound = asked.chain, asked.score(cut), _least_possible(asked)
    if _is_only_order(chain, asked.pairs):
        bound = max(bound, cut.least)
    enough = max(effort.worth, asked.tolerance * score)
    if score - bound <= enough or effort.seconds <= 0:
        return Placed(cut, _gap(score, bound))
    if asked.is_too_large(effort):
        many = f"{len(chain.names):,} units on {asked.chunks.stages} partitions are more than a solver looks through"
        return Placed(cut, _gap(score, bound), many)
    within = None
    if len(chain.names) <= MOST_UNITS:
        tight = _Tight(asked)
        bound = max(bound, tight.bound(bound, score, enough))
        if score - bound <= enough:
            return Placed(cut, _gap(score, bound))
        within = tight.within(score)
    try:
        found = solve_dag(dataclasses.replace(asked.problem, hint=cut.chunk_of, within=within), effort.seconds)
    except PlacementError as error:
        return Placed(cut, _gap(score, bound), str(error))
    if found is None:
        return Placed(cut, _gap(score, bound), "the solver found nothing in its time")
    bound = max(bound, found.bound)
    better = asked.score(found)
    if better < score * (1 - asked.tolerance):
        return Placed(found, _gap(better, bound))
    return Placed(cut, _gap(score, bound))


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


def _where_no_cut_fits(asked: _Asked, seconds: float) -> Placed | None:
    """Returns a placement within what ranks may need that no cut of one order gives; None where none was found."""
    chain, pairs = asked.chain, asked.pairs
    if _is_only_order(chain, pairs):
        return None
    within = None
    if len(chain.names) <= MOST_UNITS:
        within = StageLimits(chain, pairs, asked.chunks.in_flight, asked.ranks, asked.objective).within(math.inf)
        if within is None:
            return None
    try:
        found = solve_dag(dataclasses.replace(asked.problem, within=within), seconds)
    except PlacementError:
        return None
    if found is None:
        return None
    return Placed(found, _gap(asked.score(found), max(found.bound, _least_possible(asked))))


def _least_without_hand(asked: _Asked) -> float:
    """Returns a lower bound for all scores, also for placements that disregard what a script has put on stages."""
    found = place(
        dataclasses.replace(asked.chain, manual=()),
        asked.pairs,
        asked.chunks.stages,
        objective=asked.objective,
        microbatches=asked.microbatches,
        ranks=asked.ranks,
        chunks=asked.chunks,
    )
    assert found.gap is not None
    return asked.score(found.placement) * (1.0 - found.gap)


class _Tight:
    """`StageLimits` for a score: bytes of the fullest stage, or seconds of a step, by those of the slowest stage.

    Args:
        asked: what is to be placed.
    """

    def __init__(self, asked: _Asked) -> None:
        chain, ranks, objective = asked.chain, asked.ranks, asked.objective
        self._limits = StageLimits(chain, asked.pairs, asked.chunks.in_flight, ranks, objective)
        # A step takes the time of all stages for one microbatch, and the time of the slowest stage for the others.
        self._others = asked.microbatches - 1 if objective == "speed" else 1
        self._once = sum(chain.times) / max(ranks.speed) if objective == "speed" else 0.0

    def bound(self, low: float, score: float, worth: float) -> float:
        """Returns a lower bound for all scores, at least `low`. A bound within `worth` of `score` is near enough."""
        if not self._others:
            return low
        least = self._limits.least(max(0.0, self._largest(low)), self._largest(score), worth / self._others)
        return self._others * least + self._once

    def within(self, score: float) -> tuple[list[int], list[int]] | None:
        """Returns the first and last stages of units in any placement whose score is no worse than this one."""
        return self._limits.within(self._largest(score)) if self._others else None

    def _largest(self, score: float) -> float:
        return (score - self._once) / self._others


def _gap(score: float, bound: float) -> float:
    return max(0.0, 1.0 - bound / score) if score else 0.0


def _is_only_order(chain: Chain, needs: Sequence[tuple[int, int]]) -> bool:
    """Returns whether each unit needs the one before it, and the search for cuts looks at every owner of a weight."""
    follows = set(needs)
    shared = [weight.users for weight in chain.weights if len(weight.users) > 1]
    every_owner = len(set(shared)) == len(shared) <= MOST_SHARED_GROUPS and all(len(users) == 2 for users in shared)
    return every_owner and all((at, at + 1) in follows for at in range(len(chain.names) - 1))


def _least_possible(asked: _Asked) -> float:
    """Returns a score that no placement beats: all stages alike, none below the largest unit, and nothing sent."""
    chain, chunks, ranks = asked.chain, asked.chunks, asked.ranks
    if asked.objective == "speed":
        whole, largest = sum(chain.times), max(chain.times, default=0.0)
        slowest = max(whole / sum(ranks.speed), largest / max(ranks.speed))
        return asked.microbatches * slowest + (whole / max(ranks.speed) - slowest) / chunks.per_stage
    # At its fullest moment a stage holds at least this many stashes of each of its units, and a chunk this many of its
    # own.
    kept = min(max(min(held.values()) for held in moments) for moments in chunks.moments)
    kept_alone = min(chunks.most_of_each)
    alone = [0.0] * len(chain.names)
    whole = 0.0
    for users, nbytes, stashes in (
        *((weight.users, weight.stored, 0.0) for weight in chain.weights),
        *((stash.readers, 0.0, stash.nbytes) for stash in chain.stashes),
    ):
        whole += nbytes + stashes * kept
        if len(users) == 1:
            alone[users[0]] += nbytes + stashes * kept_alone
    return max(whole / chunks.stages, *alone)
