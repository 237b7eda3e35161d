"""Shares the optimizer's slots out over replicas, in equal bytes, and in whole variables as far as possible.

    a stage's variables, largest first       replica 0                 replica 1
    embedding 40, of 40 rows                 embedding[0:20]  20       embedding[20:40]  20
    kernel_1  16   kernel_2  16              kernel_1         16       kernel_2          16
    bias       1                             bias              1
                                                              37                         36

The largest variable comes first. Each goes whole to the replica that has least so far. Where this leaves one replica
with more than its part, the largest variables are cut into rows instead, about as many as make the shares even. Their
rows fill up the replicas from the first to the last, so that most of them have one border or none. An optimizer that
looks at a variable as a whole (Adafactor at its rows and columns, LAMB at its norm) cannot update rows. So a share of a
variable that may be cut also says who has it whole.

Source: Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM J. Appl. Math. 17(2), 1969. Without a cut, the
largest share is at most 4/3 of the largest of the best division.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from smp_tf.partition.spread import SplitOver, Whole

#: The factor by which a share may exceed its part before a variable is cut.
_TOLERANCE = 0.01
#: Bytes too few to be worth a cut. It limits a variable's size and the bytes that a replica has too much.
LEAST_CUT = 64 << 10


@dataclass(frozen=True, slots=True)
class Sized:
    """A variable that is to be shared out.

    Args:
        nbytes: its size.
        rows: its extent along axis 0; 1 where it has none.
    """

    nbytes: float
    rows: int = 1

    @property
    def may_be_cut(self) -> bool:
        """Returns whether it has rows and is worth a cut."""
        return self.nbytes >= LEAST_CUT and self.rows > 1


@dataclass(frozen=True, slots=True)
class Share:
    """Who keeps the slots of a variable.

    Args:
        replica: the replica that keeps all of them, where they are not cut.
        rows: where they are cut, or None where they are not. Replica r keeps the slots of the rows from `rows[r]` to
            `rows[r + 1]`, which may be none.
    """

    replica: int
    rows: tuple[int, ...] | None = None

    def spread(self, replicas: int) -> Whole | SplitOver:
        """Returns how the slots lie over the replicas, as a spread.

        Args:
            replicas: number of replicas.
        """
        if self.rows is None:
            return Whole("D", self.replica, replicas)
        return SplitOver("D", 0, self.rows, keeper=self.replica)


def share_out(variables: Sequence[Sized], loads: Sequence[float]) -> tuple[tuple[Share, ...], tuple[float, ...]]:
    """Says which replica keeps the slots of which variable.

    Args:
        variables: what is shared out.
        loads: bytes that each replica keeps already.

    Returns:
        The share of each variable, and the bytes that each replica then keeps. Of equal variables the first comes
        before the others; of equal replicas the first is taken.

    Example:
        >>> kilobytes = [Sized(1e3, 10), Sized(16e3, 100), Sized(40e3, 100), Sized(16e3, 100)]
        >>> shares, loads = share_out(kilobytes, [0, 0])  # too small to be cut
        >>> [share.replica for share in shares], loads
        ([1, 1, 0, 1], (40000.0, 33000.0))
        >>> megabytes = [Sized(1e6, 10), Sized(16e6, 100), Sized(40e6, 100), Sized(16e6, 100)]
        >>> shares, loads = share_out(megabytes, [0, 0])
        >>> shares[2], loads
        (Share(replica=1, rows=(0, 49, 100)), (36600000.0, 36400000.0))
    """
    part = (sum(loads) + sum(variable.nbytes for variable in variables)) / len(loads)
    tolerance = max(_TOLERANCE * part, LEAST_CUT)
    order = sorted(range(len(variables)), key=lambda i: (-variables[i].nbytes, i))
    best = _divided(variables, order, loads, [])
    may_be_cut = [i for i in order if variables[i].may_be_cut]
    # Cuts of variables with fine rows can make shares even. All variables are tried where the coarse ones are too large
    # to stay whole.
    fine = [i for i in may_be_cut if variables[i].nbytes <= tolerance * variables[i].rows]
    for candidates in [fine] if fine == may_be_cut else [fine, may_be_cut]:
        if max(best.loads) <= part + tolerance:
            break
        cut = candidates[: _count_to_cut(variables, order, loads, candidates, part, tolerance)]
        found = _divided(variables, order, loads, cut)
        # A cut that does not help is not made.
        if max(found.loads) < max(best.loads):
            best = found
    return best.shares, best.loads


def fullest_share(variables: Sequence[Sized], slots: Sequence[float], replicas: int) -> float:
    """Returns the bytes of the slots of the replica that keeps most.

    Args:
        variables: the variables of a stage.
        slots: bytes of all slots of each variable.
        replicas: number of replicas that share them.

    Returns:
        Bytes.

    Example:
        >>> megabytes = [Sized(1e6, 10), Sized(16e6, 100), Sized(40e6, 100), Sized(16e6, 100)]
        >>> twice = [2e6, 32e6, 80e6, 32e6]
        >>> [fullest_share(megabytes, twice, replicas) for replicas in (1, 2)]
        [146000000.0, 73200000.0]
    """
    kept = [0.0] * replicas
    shares, _ = share_out(variables, kept)
    for all_slots, share in zip(slots, shares, strict=True):
        spread = share.spread(replicas)
        if isinstance(spread, Whole):
            kept[spread.at] += all_slots
        else:
            for replica, part in _parts(spread.borders):
                kept[replica] += part * all_slots
    return max(kept)


@dataclass(frozen=True, slots=True)
class _Division:
    """Variables divided over replicas.

    Args:
        shares: share of each variable.
        loads: bytes that each replica keeps.
    """

    shares: tuple[Share, ...]
    loads: tuple[float, ...]


def _divided(variables: Sequence[Sized], order: Sequence[int], loads: Sequence[float], cut: Sequence[int]) -> _Division:
    """Divides variables, the largest first, and cuts some of them."""
    whole, kept = _placed(variables, _without(order, cut), loads)
    rows = dict(zip(cut, _borders([variables[i] for i in cut], kept), strict=True))
    filled = list(kept)
    for i, borders in rows.items():
        parts = _parts(borders)
        for replica, part in parts:
            filled[replica] += part * variables[i].nbytes
        if len(parts) == 1:
            # After all, it fills the memory of one replica.
            whole[i] = parts[0][0]
            kept[whole[i]] += variables[i].nbytes
    # Who has a cut variable whole where the optimizer cannot update rows.
    instead, _ = _placed(variables, _without(cut, whole), kept)
    shares = (Share(whole[i]) if i in whole else Share(instead[i], rows[i]) for i in range(len(variables)))
    return _Division(tuple(shares), tuple(filled))


def _placed(
    variables: Sequence[Sized], order: Sequence[int], loads: Sequence[float]
) -> tuple[dict[int, int], list[float]]:
    """Returns the replica of each variable, the one that has least so far, and what the replicas have then."""
    left = [(load, replica) for replica, load in enumerate(loads)]
    heapq.heapify(left)
    found: dict[int, int] = {}
    for i in order:
        load, found[i] = left[0]
        heapq.heapreplace(left, (load + variables[i].nbytes, found[i]))
    return found, [load for load, _ in sorted(left, key=lambda one: one[1])]


def _without(order: Sequence[int], some: Collection[int]) -> list[int]:
    left_out = set(some)
    return [i for i in order if i not in left_out]


def _count_to_cut(
    variables: Sequence[Sized],
    order: Sequence[int],
    loads: Sequence[float],
    candidates: Sequence[int],
    part: float,
    tolerance: float,
) -> int:
    """Returns how many variables to cut so that no replica has too much of what stays whole.

    It is found by bisection. Fewer cuts might do, because the largest load may fall when one more variable is whole.

    Args:
        variables: what is shared out.
        order: positions of all variables, the largest first.
        loads: bytes that each replica keeps already.
        candidates: positions of the variables that may be cut, the largest first.
        part: bytes of an equal share.
        tolerance: how many bytes more than its part a replica may have.
    """

    def load_of_whole(count: int) -> float:
        return max(_placed(variables, _without(order, candidates[:count]), loads)[1])

    # Where a replica has too much that cannot be cut, less on the others would not help.
    limit = max(part, load_of_whole(len(candidates))) + tolerance
    too_few, enough = 0, 1
    while enough < len(candidates) and load_of_whole(enough) > limit:
        too_few, enough = enough, 2 * enough
    enough = min(enough, len(candidates))
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if load_of_whole(middle) > limit:
            too_few = middle
        else:
            enough = middle
    return enough


def _borders(cut: Sequence[Sized], kept: Sequence[float]) -> list[tuple[int, ...]]:
    """Returns the rows at which one replica's part ends and the next one's begins, so that all keep equally much.

    Args:
        cut: the variables.
        kept: bytes that each replica keeps besides these.
    """
    whole = sum(variable.nbytes for variable in cut)
    level = (sum(kept) + whole) / len(kept)
    rooms = [max(0.0, level - load) for load in kept]
    scale = whole / (sum(rooms) or 1.0)
    # The ends of the replicas' parts in the row of all variables.
    ends = [scale * end for end in accumulate(rooms[:-1])]
    borders, begin = [], 0.0
    for variable in cut:
        end = begin + variable.nbytes
        first, last = bisect_left(ends, begin), bisect_left(ends, end)
        inside = (round((at - begin) / variable.nbytes * variable.rows) for at in ends[first:last])
        borders.append((0,) * (first + 1) + tuple(inside) + (variable.rows,) * (len(kept) - last))
        begin = end
    return borders


def _parts(rows: Sequence[int]) -> list[tuple[int, float]]:
    """Returns the replicas that have rows of a variable, and each one's part of all rows."""
    first, last = bisect_right(rows, 0) - 1, bisect_left(rows, rows[-1])
    return [(r, (rows[r + 1] - rows[r]) / rows[-1]) for r in range(first, last) if rows[r] < rows[r + 1]]
