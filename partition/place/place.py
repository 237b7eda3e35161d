"""Places the units of a step, by the best cut of one order or better, and says how much better any placement can be.

    units in one order ──▶ solve_chain: the best cut ──▶ is no other order possible? done
                                                    ├──▶ stage_limits: is no placement much better? done
                                                    └──▶ solve_dag: the best placement in any order, or a bound
    the best balanced ──▶ fewest_bytes: of all that are nearly as balanced, the one that sends the fewest bytes

A model whose layers follow one another has only one order, and its best cut is the best placement. Where a model has
branches, a placement may put one branch next to the other in a way that no cut of one order does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable

from smp_tf.partition.errors import MemoryLimitError, PlacementError
from smp_tf.partition.place.asked import Asked, Effort, Placed
from smp_tf.partition.place.fewest_bytes import with_fewest_bytes
from smp_tf.partition.place.front_search import Fronts
from smp_tf.partition.place.placement import Chain, Chunks, Placement, Ranks, in_flight_of
from smp_tf.partition.place.solve_chain import ChainSolution, solve_chain
from smp_tf.partition.place.solve_chunks import LOOKS, looks_at_all, solve_chunks
from smp_tf.partition.place.solve_dag import solve_dag
from smp_tf.partition.place.stage_limits import MOST_UNITS, StageLimits


def place(
    chain: Chain,
    needs: Iterable[tuple[int, int]],
    stages: int,
    *,
    objective: str = "memory",
    microbatches: int = 1,
    ranks: Ranks | None = None,
    effort: Effort | None = None,
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
        effort: how far to look beyond the best balanced cut of one order; None for no further.
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
    asked = Asked(chain, pairs, objective, microbatches, ranks or Ranks.alike(stages), chunks)
    effort = effort or Effort()
    balanced = _best_balanced(asked, effort)
    return with_fewest_bytes(asked, balanced, effort) if effort.tolerance > 0 and stages > 1 else balanced


def _best_balanced(asked: Asked, effort: Effort) -> Placed:
    """Returns the placement with the best balance that is found."""
    if not asked.chunks.are_stages:
        return _in_chunks(asked, goes_on=effort.tolerance > 0)
    try:
        cut = solve_chain(
            asked.chain,
            asked.chunks.stages,
            objective=asked.objective,
            microbatches=asked.microbatches,
            in_flight=asked.chunks.in_flight,
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


def _in_chunks(asked: Asked, *, goes_on: bool) -> Placed:
    """Returns the best cut where stages have several chunks.

    Args:
        asked: what is placed.
        goes_on: whether a search for fewer bytes goes on from the cut, which makes it more even first.
    """
    chain, chunks = asked.chain, asked.chunks
    cut = None
    if goes_on and Fronts.of(chunks.placement) is not None:
        # Where the first cuts need too much, others may not.
        with contextlib.suppress(MemoryLimitError):
            cut = _cut_into_chunks(asked, 0)
    cut = cut or _cut_into_chunks(asked, LOOKS)
    score = asked.score(cut)
    bound = _least_possible(asked)
    if not asked.is_by_hand and looks_at_all(chain, chunks) and asked.is_only_order:
        bound = score
    return Placed(cut, None if asked.is_pinned else _gap(score, bound))


def _cut_into_chunks(asked: Asked, looks: int) -> Placement:
    return solve_chunks(
        asked.chain,
        asked.chunks,
        objective=asked.objective,
        microbatches=asked.microbatches,
        ranks=asked.ranks,
        looks=looks,
    )


def _better_than(cut: ChainSolution, asked: Asked, effort: Effort) -> Placed:
    """Returns a placement that is better than the best cut of one order, or that cut with what is proved about it."""
    chain, score, bound = asked.chain, asked.score(cut), _least_possible(asked)
    if asked.is_only_order:
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


def _where_no_cut_fits(asked: Asked, seconds: float) -> Placed | None:
    """Returns a placement within what ranks may need that no cut of one order gives; None where none was found."""
    chain, pairs = asked.chain, asked.pairs
    if asked.is_only_order:
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


def _least_without_hand(asked: Asked) -> float:
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

    def __init__(self, asked: Asked) -> None:
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


def _least_possible(asked: Asked) -> float:
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
