"""Cuts a chain of units into stages, and finds the best of all contiguous cuts, or the one that sends the fewest bytes.

    units   u0  u1  u2  u3  u4  u5  u6      run_costs: what every run of units costs
    stages  [───0───]  [──1──]  [──2──]     cut_search: the best of all cuts

A weight that several units use is owned by the stage of its first or of its last use. Every other stage that uses it
has a copy. Both are solved and the better is taken. Keeping all its uses on one stage needs no case of its own, since
only a cut between them costs a copy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product, zip_longest

import numpy as np
from numpy.typing import NDArray

from smp_tf.partition.errors import MemoryLimitError, PlacementError
from smp_tf.partition.place.cut_search import CutSearch, Most
from smp_tf.partition.place.placement import (
    Chain,
    Chunks,
    Placement,
    Ranks,
    check_units,
    costed,
    in_flight_of,
    placed_by_hand,
)
from smp_tf.partition.place.run_costs import UNREACHABLE, RunCosts
from smp_tf.partition.units.cost import Weight

#: Up to so many shared weights (groups with the same users) each choice of owners is tried; more are all owned alike.
MOST_SHARED_GROUPS = 3
#: The share by which two costs may differ and count as equal, since costs are estimates.
TOLERANCE = 0.005


@dataclass(frozen=True)
class ChainSolution(Placement):
    """The cut that was taken, in which every stage is a run of units, and how good a cut can be.

    Args:
        least: the score of the best cut. The cut that was taken is within the tolerance of it.
    """

    least: float = 0.0


def solve_chain(
    chain: Chain,
    stages: int,
    *,
    objective: str = "memory",
    microbatches: int = 1,
    in_flight: Sequence[int] | None = None,
    ranks: Ranks | None = None,
    tolerance: float = TOLERANCE,
    placement: Sequence[int] | None = None,
) -> ChainSolution:
    """Cuts a chain into exactly `stages` runs of units, none empty.

    Args:
        chain: the units and their costs.
        stages: number of stages.
        objective: "speed": least sum(c) + (microbatches - 1) max(c) over the stages' times c;
            "memory": least bytes on the fullest stage.
        microbatches: microbatches per step.
        in_flight: microbatches whose stash a stage holds at once, by the schedule; by default those of 1F1B, min(stages
            - r, microbatches).
        ranks: how these differ, and what they may need; None where they are alike and may need anything.
        tolerance: among the cuts that are this close to the best, the one with the least memory (for "speed") or time
            (for "memory") is taken, since costs are estimates.
        placement: the stage of each run, where runs are chunks and a stage may have several. A unit that is placed by
            hand may then be in any chunk of its stage. The costs are still those of runs.

    Returns:
        The cut, and what each run costs.

    Raises:
        PlacementError: there are fewer units than stages, or manual placements are not in order.
        MemoryLimitError: no cut keeps within what ranks may need.

    Example:
        >>> solve_chain(Chain(("a", "b", "c"), (1.0, 2.0, 3.0)), 2, objective="speed").cuts
        (2,)

    Source:
        Objective: Alpa (arXiv 2201.12023), section 5; the recurrence is the one for partitioning a
            chain.
    """
    if objective not in ("speed", "memory"):
        raise PlacementError(f'optimize must be "memory" or "speed". Received: {objective!r}.')
    held = in_flight_of(stages, microbatches, in_flight)
    ranks = ranks or Ranks.alike(stages)
    _check(chain, stages, placement)
    allowed = earliest_starts(chain, placement or range(stages))
    best: Placement | None = None
    least = UNREACHABLE
    for late in owner_choices(chain.weights):
        search = CutSearch(RunCosts.of(chain, late, microbatches), allowed, held, microbatches, ranks)
        cuts, score = search.fastest(tolerance) if objective == "speed" else search.smallest(tolerance)
        if cuts is None:
            continue
        least = min(least, score)
        found = _placement(chain, search, cuts, late)
        if best is None or _order(found, objective, microbatches) < _order(best, objective, microbatches):
            best = found
    if best is None:
        raise _does_not_fit(chain, stages, allowed, held, microbatches, ranks)
    return ChainSolution(best.chunk_of, best.owners, best.times, best.memory, least=least)


def cuts_that_send_least(
    chain: Chain,
    bounds: Sequence[tuple[Most, bool]],
    *,
    microbatches: int,
    in_flight: Sequence[int],
    ranks: Ranks,
    placement: Sequence[int] | None = None,
) -> list[tuple[Placement | None, float]]:
    """Returns the cuts that send the fewest bytes.

    Args:
        chain: the units and their costs.
        bounds: for each cut what stages and the step may have, and whether of equal cuts the one with the shortest step
            is searched for. Where it is not, the step may take any time.
        microbatches: microbatches per step.
        in_flight: microbatches whose stash each stage holds at once.
        ranks: how these differ, and what they may need.
        placement: the stage of each run, where runs are chunks and a stage may have several. Costs are those of runs.

    Returns:
        For each bound the cut, None where none was found; and the bytes of a microbatch below which no cut sends.

    Example:
        >>> chain = Chain(("a", "b", "c"), (1.0, 1.1, 1.0), (Flow(0, (1,), 9.0), Flow(1, (2,), 1.0)))
        >>> [(cut, bytes)] = cuts_that_send_least(
        ...     chain, [(Most(), True)], microbatches=1, in_flight=(1, 1), ranks=Ranks.alike(2)
        ... )
        >>> cut.cuts, bytes
        ((2,), 1.0)
    """
    allowed = earliest_starts(chain, placement or range(len(in_flight)))
    best: list[tuple[tuple[float, float], Placement] | None] = [None] * len(bounds)
    least = [UNREACHABLE] * len(bounds)
    for late in owner_choices(chain.weights):
        search = CutSearch(RunCosts.of(chain, late, microbatches), allowed, in_flight, microbatches, ranks)
        for at, (most, by_step) in enumerate(bounds):
            cuts, sent = search.sends_least(most, by_step=by_step)
            least[at] = min(least[at], sent / microbatches)
            if cuts is None:
                continue
            order, known = (search.sent(cuts), search.step_time(cuts)), best[at]
            if known is None or order < known[0]:
                best[at] = order, _placement(chain, search, cuts, late)
    return [(known[1] if known is not None else None, sent) for known, sent in zip(best, least, strict=True)]


def _placement(chain: Chain, search: CutSearch, cuts: Sequence[int], late: Collection[int]) -> Placement:
    """Returns the placement of cuts, where some shared weights are owned by their last user."""
    stage_of = chunks_of_cuts(cuts, len(chain.names))
    owners = {w.variable: stage_of[w.users[-1 if w.variable in late else 0]] for w in chain.weights}
    return Placement(stage_of, owners, *search.of_cuts(cuts))


def _order(placement: Placement, objective: str, microbatches: int) -> tuple[float, float]:
    """Returns the cost that is balanced, then the other one."""
    seconds, nbytes = placement.score("speed", microbatches), placement.score("memory", microbatches)
    return (seconds, nbytes) if objective == "speed" else (nbytes, seconds)


def follow_owners(
    chain: Chain,
    stages: int,
    owners: Mapping[int, int],
    microbatches: int = 1,
    chunks: Chunks | None = None,
    ranks: Ranks | None = None,
) -> Placement:
    """Puts the units of a chain where an earlier step put their variables. Chunks may stay empty.

        owned by chunk   -  0  -  -  1  -        GAN after training: only the generator, all of it in chunk 0
        placed in        0  0  0  0  1  1             0  0  -  0   ──▶  0  0  0  0

    A unit without an owned variable stays with the unit before it, so nothing more has to cross. A variable of several
    units pins none of them.

    Args:
        chain: the units. `pinned` holds the chunk that owns the unit's variables, or None.
        stages: number of stages.
        owners: chunk of variables whose owner an earlier step decided.
        microbatches: over which the copies of a step are spread.
        chunks: where the chunks are, and what they keep; None for one on every stage that keeps one microbatch.
        ranks: how these differ; None where they do not.

    Returns:
        The placement. Its times and memory are estimated as for any cut.

    Raises:
        PlacementError: data would have to flow from a later chunk to an earlier one.
    """
    chunks = chunks or Chunks.one_each([1] * stages)
    placed_by_hand(chain, stages)
    manual = chain.manual if chunks.are_stages else ()
    asked = [
        stage if pin is None else pin
        for pin, stage in zip_longest(chain.pinned or [None] * len(chain.names), manual, fillvalue=None)
    ]
    pins = [(chunk, name) for chunk, name in zip(asked, chain.names, strict=True) if chunk is not None]
    for (first, before), (second, name) in pairwise(pins):
        if second < first:
            raise PlacementError(
                f"An earlier step put the variables of {before!r} on stage {chunks.placement[first]} and those of "
                f"{name!r} on stage {chunks.placement[second]}, where they stay. In this step data flows from "
                f"{before!r} to {name!r}, and it cannot flow from a later stage to an earlier one. Let a step "
                f"that uses all of these layers run first: it then decides for the others. One call of predict on the "
                f"whole model, before the first fit, is enough."
            )
    chunk = pins[0][0] if pins else 0
    chunk_of = []
    for pin in asked:
        chunk = chunk if pin is None else pin
        chunk_of.append(chunk)
    return costed(chain, chunk_of, owners, microbatches, chunks, ranks)


def chunks_of_cuts(cuts: Sequence[int], count: int) -> tuple[int, ...]:
    """Returns the run that each unit is in.

    Args:
        cuts: first unit of run 1, of run 2 and so on.
        count: number of units.
    """
    return tuple(stage for stage, (a, b) in enumerate(pairwise((0, *cuts, count))) for _ in range(b - a))


# --- what is asked --------------------------------------------------------------------------------


def _check(chain: Chain, stages: int, placement: Sequence[int] | None) -> None:
    if stages < 1:
        raise PlacementError(f"A model is cut into at least 1 partition. Received: {stages}.")
    check_units(chain.names, stages)
    by_hand = placed_by_hand(chain, stages if placement is None else 1 + max(placement))
    for (first, before), (second, name) in pairwise(by_hand):
        if second < first and placement is None:
            raise PlacementError(
                f"Partitions must follow the order in which data flows: {before!r}, on partition "
                f"{first}, comes before "
                f"{name!r}, on partition {second}. Place them in order, or set contiguous to false."
            )


def earliest_starts(chain: Chain, placement: Sequence[int]) -> NDArray[np.int64]:
    """Returns, for every chunk and end, the first start of a run without units placed elsewhere.

    Args:
        chain: the units, with what is given of their places.
        placement: the stage of every chunk.
    """
    count = len(chain.names)
    starts = np.zeros((len(placement), count + 1), np.int64)
    for unit, (stage, pin) in enumerate(zip_longest(chain.manual, chain.pinned, fillvalue=None)):
        elsewhere = [c for c, own in enumerate(placement) if stage not in (None, own) or pin not in (None, c)]
        starts[elsewhere, unit + 1 :] = unit + 1
    return starts


def owner_choices(weights: Sequence[Weight]) -> list[frozenset[int]]:
    """Returns the sets of shared variables to be owned by their last user instead of their first.

    Args:
        weights: all weights.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for weight in weights:
        if len(weight.users) > 1:
            groups.setdefault(weight.users, []).append(weight.variable)
    together = list(groups.values())
    if len(together) > MOST_SHARED_GROUPS:
        together = [[v for group in together for v in group]]
    return [
        frozenset(v for group, late in zip(together, choice, strict=True) if late for v in group)
        for choice in product((False, True), repeat=len(together))
    ]


def _does_not_fit(
    chain: Chain,
    stages: int,
    starts: NDArray[np.int64],
    in_flight: Sequence[int],
    microbatches: int,
    ranks: Ranks,
) -> PlacementError:
    """Returns why no cut was found: a limit, and the stage that exceeds it in the best cut without a limit."""
    without = Ranks(ranks.speed, ranks.link, (None,) * stages)
    search = CutSearch(RunCosts.of(chain, frozenset(), microbatches), starts, in_flight, microbatches, without)
    cuts, _ = search.smallest(0.0)
    if cuts is None:
        return PlacementError(
            f"No cut into {stages} partitions agrees with the manual placements: between two placed layers there must "
            f"be at least one unit for every partition between theirs."
        )
    _, memory = search.of_cuts(cuts)
    limits = [UNREACHABLE if limit is None else limit for limit in ranks.memory]
    worst = max(range(stages), key=lambda r: memory[r] - limits[r])
    bounds = (0, *cuts, len(chain.names))
    inside = chain.names[bounds[worst] : bounds[worst + 1]]
    what = f"{inside[0]} alone is" if len(inside) == 1 else f"{inside[0]} to {inside[-1]} are"
    return MemoryLimitError(
        f"No cut into {stages} partitions fits in memory_limit. Stage {worst}: {what} "
        f"{memory[worst] / 2**30:.2f} GiB, the limit is {limits[worst] / 2**30:.2f} GiB."
    )
