"""Takes, of all placements that are nearly as balanced as the best, the one that sends the fewest bytes.

    best balanced ──▶ what stages may have: its balance, and a tolerance more
                        ├──▶ solve_chain: the cut of one order within that which sends the fewest bytes, exactly
                        ├──▶ least_crossing: where branches can be next to each other, what any placement sends at least
                        ├──▶ border_search: where few units can be on either side, the best of all placements
                        ├──▶ solve_dag: where that does not prove enough, any placement, or a better bound
                        ├──▶ chunk_paths: where stages have several chunks, cuts that send few bytes, and a bound
                        ├──▶ front_search: where that is far from its bound, the best cut at some places, of two chunks
                        └──▶ chunk_search: and cuts that are found from there
                      ──▶ of those found the one that sends the fewest bytes, then the one with the shortest step

Balance is the bytes of the fullest stage, or the seconds of the slowest one per microbatch. By speed, the step may not
take longer than the tolerance allows, either.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from smp_tf.partition.errors import PlacementError
from smp_tf.partition.place.asked import Asked, Effort, Placed
from smp_tf.partition.place.border_search import BorderSearch
from smp_tf.partition.place.chunk_paths import ChunkPaths
from smp_tf.partition.place.chunk_search import ChunkSearch, Cuts
from smp_tf.partition.place.cut_search import Most
from smp_tf.partition.place.front_search import Fronts, FrontSearch
from smp_tf.partition.place.least_crossing import least_crossing
from smp_tf.partition.place.placement import Placement, Ranks, costed
from smp_tf.partition.place.solve_chain import chunks_of_cuts, cuts_that_send_least
from smp_tf.partition.place.solve_chunks import all_placements, looks_at_all
from smp_tf.partition.place.solve_dag import solve_dag
from smp_tf.partition.place.stage_limits import MOST_UNITS, StageLimits
from smp_tf.partition.place.trade import Offer, Trade

#: The share of the search's seconds that is spent on placements that send fewer bytes.
_SHARE = 0.5
#: The share by which a placement may send more than a bound and still count as proved to send least.
_NEAR = 1e-9
#: The share of a bound that cuts into chunks may send without a search for better ones.
_ENOUGH = 1.1
#: Up to so many units, searches that take longer find nothing more.
_FEW_UNITS = 40
#: The parts of what a stage may have that each of its chunks may have in the first cuts, in equal parts.
_SHARES = (1.02, 1.2, 1.5)


class _Offered(NamedTuple):
    """A placement with what it has to offer."""

    placement: Placement
    offer: Offer


@dataclasses.dataclass
class _Found:
    """Placements that were found.

    Args:
        balanced: the best balanced one.
        within: those that keep within the tolerance, with the best balanced one.
        any: others, whatever their balance.
        bound: the bytes per microbatch below which no placement within the tolerance sends, or None.
        bound_of_cuts: the same for cuts in the order of the layers.
    """

    balanced: _Offered
    within: list[_Offered]
    any: list[_Offered]
    bound: float | None = None
    bound_of_cuts: float | None = None


def with_fewest_bytes(asked: Asked, balanced: Placed, effort: Effort) -> Placed:
    """Returns the placement that sends the fewest bytes of those within the tolerance, and what it gives up for that.

    Args:
        asked: what is placed.
        balanced: the best balanced placement that was found.
        effort: how far to look.
    """
    if asked.leaves_no_choice:
        return balanced
    if asked.chunks.are_stages:
        found = _in_stages(asked, balanced.placement, effort)
    elif looks_at_all(asked.chain, asked.chunks):
        found = _of_all_cuts(asked, balanced.placement, effort)
    else:
        found = _in_chunks(asked, balanced.placement, effort)
    taken = _first(found.within)
    least = _first([taken, *found.any])
    trade = Trade(
        effort.tolerance,
        found.balanced.offer,
        taken.offer,
        least.offer,
        found.bound,
        found.bound_of_cuts,
    )
    gap = _gap(asked, balanced, found.balanced.placement)
    return dataclasses.replace(balanced, placement=taken.placement, gap=gap, trade=trade)


def _offered(asked: Asked, placement: Placement) -> _Offered:
    return _Offered(placement, Offer.of(asked.chain, placement, asked.objective, asked.microbatches))


def _first(offered: Iterable[_Offered]) -> _Offered:
    """Returns the placement that sends the fewest bytes, and of equal ones the one with the shortest step."""
    return min(offered, key=_order)


def _order(offered: _Offered) -> tuple[float, float]:
    return offered.offer.sent, offered.offer.step


def _gap(asked: Asked, before: Placed, now: Placement) -> float | None:
    """Returns the gap of the best balanced placement, which may be another one by now."""
    score = asked.score(now)
    if before.gap is None or not score:
        return before.gap
    return max(0.0, 1.0 - asked.score(before.placement) * (1.0 - before.gap) / score)


def _in_stages(asked: Asked, balanced: Placement, effort: Effort) -> _Found:
    """Returns the cut that sends the fewest bytes, where each stage has one chunk, and what any placement may send."""
    best = _offered(asked, balanced)
    most = best.offer.within(asked.objective, effort.tolerance)
    (cut, bound), (least, _) = cuts_that_send_least(
        asked.chain,
        [(most, True), (Most(), False)],
        microbatches=asked.microbatches,
        in_flight=asked.chunks.in_flight,
        ranks=asked.ranks,
    )
    found = _Found(best, [best, *_some(asked, cut)], _some(asked, least))
    found.bound_of_cuts = bound if math.isfinite(bound) else None
    if asked.is_only_order and not asked.is_by_hand:
        found.bound = found.bound_of_cuts
        return found
    other, found.bound = _of_any_order(asked, effort, most, _first(found.within))
    found.within += _some(asked, other)
    return found


def _some(asked: Asked, placement: Placement | None) -> list[_Offered]:
    return [] if placement is None else [_offered(asked, placement)]


def _of_any_order(asked: Asked, effort: Effort, most: Most, known: _Offered) -> tuple[Placement | None, float | None]:
    """Returns a placement that sends few bytes, whatever its order, and a bound for all; None where none is known.

    Args:
        asked: what is placed.
        effort: how far to look.
        most: what stages and the step may have.
        known: the best placement that is known.
    """
    is_worth = known.offer.sent > effort.worth_sent
    if not is_worth or effort.seconds <= 0 or asked.is_pinned or asked.is_by_hand or asked.is_too_large(effort):
        return None, None
    within, bound = None, None
    if len(asked.chain.names) <= MOST_UNITS:
        limits = StageLimits(asked.chain, asked.pairs, asked.chunks.in_flight, asked.ranks, asked.objective)
        within = limits.within(most.memory if asked.objective == "memory" else most.time)
        assert within is not None, "a placement is known that keeps within the limit"
        bound = least_crossing(asked.chain, asked.pairs, within, asked.chunks.stages, asked.microbatches)
        if known.offer.sent <= bound * (1 + _NEAR):
            return None, min(bound, known.offer.sent)
        borders = BorderSearch(asked, within)
        if not borders.is_too_large:
            placement, least = borders.sends_least(most)
            bound = min(max(bound, least), known.offer.sent)
            if placement is not None and _is_within(asked, placement, most):
                return placement, bound
            if known.offer.sent <= bound * (1 + _NEAR):
                return None, bound
    problem = dataclasses.replace(asked.problem, hint=known.placement.chunk_of, within=within, most=most)
    try:
        found = solve_dag(problem, _SHARE * effort.seconds)
    except PlacementError:
        return None, bound
    if found is None:
        return None, bound
    return found, max(found.bound, min(bound or 0.0, known.offer.sent))


def _of_all_cuts(asked: Asked, balanced: Placement, effort: Effort) -> _Found:
    """Returns all cuts that keep within the tolerance, where stages have several chunks and there are few cuts."""
    best = _offered(asked, balanced)
    most = best.offer.within(asked.objective, effort.tolerance)
    found = _Found(best, [best], [])
    for placement in all_placements(asked.chain, asked.chunks, asked.objective, asked.microbatches, asked.ranks):
        (found.within if _is_within(asked, placement, most) else found.any).append(_offered(asked, placement))
    found.bound_of_cuts = _first(found.within).offer.sent
    found.bound = found.bound_of_cuts if asked.is_only_order and not asked.is_by_hand else None
    return found


def _in_chunks(asked: Asked, balanced: Placement, effort: Effort) -> _Found:
    """Returns cuts that send few bytes, where stages have several chunks."""
    chain, chunks, ranks = asked.chain, asked.chunks, asked.ranks
    search = ChunkSearch(chain, chunks, asked.objective, asked.microbatches, ranks)
    fronts = paths = None
    if not ChunkPaths.is_too_large(chain, chunks):
        paths = ChunkPaths(chain, chunks, asked.objective, asked.microbatches, ranks, search)
    if Fronts.of(chunks.placement) is not None and (paths is None or len(chain.names) > _FEW_UNITS):
        fronts = FrontSearch(chain, chunks, asked.objective, asked.microbatches, ranks)

    def placed(cuts: Cuts) -> Placement:
        chunk_of, late = chunks_of_cuts(cuts, len(chain.names)), search.late(cuts)
        owners = {w.variable: chunk_of[w.users[-1 if w.variable in late else 0]] for w in chain.weights}
        return costed(chain, chunk_of, owners, asked.microbatches, chunks, ranks)

    even = placed(_more_even(asked, balanced.cuts, search, paths, fronts))
    if asked.score(even) < asked.score(balanced) and _is_within(asked, even, Most()):
        balanced = even
    best = _offered(asked, balanced)
    most = best.offer.within(asked.objective, effort.tolerance)
    load = most.memory if asked.objective == "memory" else most.time
    cuts, bound = balanced.cuts, 0.0
    if paths is not None:
        cuts, bound = paths.sends_least(load, most.step, cuts)
    sent = float(search.sent(np.asarray([cuts]))[0])
    if sent > _ENOUGH * bound and (paths is None or len(chain.names) > _FEW_UNITS):
        starts = [cuts]
        if fronts is not None:
            starts += fronts.sends_least(load, balanced.cuts, sent)
        else:
            starts += _of_chunks_alone(asked, [load * share / chunks.per_stage for share in _SHARES])
        cuts = search.sends_less(starts, load, most.step, cuts)
    less = placed(cuts)
    within = _some(asked, less) if _is_within(asked, less, most) else []
    others = [*_of_chunks_alone(asked, [math.inf]), *([] if paths is None else [paths.sends_least_of_all()])]
    others = [cuts for cuts in others if search.look(np.asarray([cuts])).over[0] <= 0]
    found = _Found(best, [best, *within], [_offered(asked, placed(cuts)) for cuts in others])
    fewest = _first(found.within).offer.sent
    if bound or not fewest:
        found.bound_of_cuts = min(bound / asked.microbatches, fewest)
        found.bound = found.bound_of_cuts if asked.is_only_order and not asked.is_by_hand else None
    return found


def _more_even(
    asked: Asked, known: Cuts, search: ChunkSearch, paths: ChunkPaths | None, fronts: FrontSearch | None
) -> Cuts:
    """Returns cuts into chunks that are more even than those that are known."""
    starts, share = [known], 0.0
    if paths is not None:
        even, share = paths.most_even(known)
        starts.append(even)
    if fronts is not None and share < 1 - asked.tolerance:
        starts += fronts.most_even(known)
    return search.more_even(starts)


def _of_chunks_alone(asked: Asked, parts: Sequence[float]) -> list[Cuts]:
    """Returns the cuts that would send the fewest bytes if each chunk had a stage for itself.

    Args:
        asked: what is placed.
        parts: what each of these stages may have of what is balanced, for each cut.
    """
    chunks, ranks = asked.chunks, asked.ranks
    of_chunks = Ranks(
        tuple(ranks.speed[stage] for stage in chunks.placement),
        tuple(ranks.link[stage] for stage in chunks.placement),
        tuple(ranks.memory[stage] for stage in chunks.placement),
    )
    found = cuts_that_send_least(
        asked.chain,
        [(Most(memory=part) if asked.objective == "memory" else Most(time=part), False) for part in parts],
        microbatches=asked.microbatches,
        in_flight=chunks.most_of_each,
        ranks=of_chunks,
        placement=chunks.placement,
    )
    return list(dict.fromkeys(cut.cuts for cut, _ in found if cut is not None))


def _is_within(asked: Asked, placement: Placement, most: Most) -> bool:
    """Returns whether a placement has no more than it may, and keeps within the limits of ranks."""
    limits = zip(placement.memory, asked.ranks.memory, strict=True)
    return (
        all(limit is None or held <= limit for held, limit in limits)
        and max(placement.memory) <= most.memory
        and max(placement.times) <= most.time
        and placement.score("speed", asked.microbatches) <= most.step
    )
