"""Shares of the optimizer's slots: even ones, of whole variables and of rows, the same on every rank."""

from __future__ import annotations

import doctest
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_tf.partition.place import slot_shares
from smp_tf.partition.place.slot_shares import LEAST_CUT, Share, Sized, fullest_share, share_out
from smp_tf.partition.spread import SplitOver, Whole

KIB, MIB = 1 << 10, 1 << 20


def test_the_examples_are_true() -> None:
    failed, tried = doctest.testmod(slot_shares)
    assert (failed, tried) == (0, 9)


@pytest.mark.parametrize(
    ("sizes", "loads", "wanted"),
    [
        ([], [0, 0], ()),
        ([5], [0, 0, 0], (0,)),
        ([1, 1, 1, 1], [0, 0], (0, 1, 0, 1)),
        ([40, 16, 16, 1], [0, 0], (0, 1, 1, 1)),
        # What replicas keep of models before.
        ([4, 4, 4], [9, 0, 1], (1, 2, 1)),
        ([3, 0, 0], [0, 0], (0, 1, 1)),
    ],
)
@pytest.mark.parametrize("scale", [1, MIB])
def test_without_rows_the_largest_goes_first_to_whoever_has_least(
    sizes: list[int], loads: list[int], wanted: tuple[int], scale: int
) -> None:
    shares, _ = share_out([Sized(size * scale) for size in sizes], [load * scale for load in loads])
    assert shares == tuple(Share(replica) for replica in wanted)


@pytest.mark.parametrize(
    ("variables", "loads", "shares", "kept"),
    [
        # Even as they are.
        ([Sized(4, 4), Sized(2, 2), Sized(2, 2)], [0, 0], [Share(0), Share(1), Share(1)], (4, 4)),
        ([Sized(8, 8)], [0, 0], [Share(0, (0, 4, 8))], (4, 4)),
        ([Sized(8, 8), Sized(2, 2)], [0, 0], [Share(1, (0, 3, 8)), Share(0)], (5, 5)),
        # The first of the largest; and no more than it takes.
        ([Sized(4, 4), Sized(4, 4), Sized(4, 4)], [0, 0], [Share(0, (0, 2, 4)), Share(0), Share(1)], (6, 6)),
        ([Sized(6, 6), Sized(3, 3)], [0, 0, 0], [Share(1, (0, 0, 3, 6)), Share(0)], (3, 3, 3)),
        # Those that have no room have no rows; of several that are cut, some have rows of two.
        (
            [Sized(8, 8), Sized(4, 4), Sized(4, 4)],
            [0, 0, 0, 0],
            [Share(2, (0, 0, 0, 4, 8)), Share(0), Share(1)],
            (4, 4, 4, 4),
        ),
        ([Sized(6, 6), Sized(6, 6)], [0, 0, 0], [Share(0, (0, 4, 6, 6)), Share(1, (0, 0, 2, 6))], (4, 4, 4)),
        # What replicas keep of models before is made up for, as far as it can be.
        ([Sized(8, 8)], [0, 4], [Share(0, (0, 6, 8))], (6, 6)),
        ([Sized(4, 4)], [3, 0, 2], [Share(1, (0, 0, 3, 4))], (3, 3, 3)),
        ([Sized(4, 4)], [9, 0, 2], [Share(1)], (9, 4, 2)),
        ([Sized(45, 4500)], [0, 40, 0], [Share(0, (0, 2250, 2250, 4500))], (22.5, 40, 22.5)),
        # Where one has too much anyway, no more is cut than what others have beyond that.
        (
            [Sized(31, 3100), Sized(30), Sized(5, 500), Sized(5, 500)],
            [0, 0, 0],
            [Share(1, (0, 0, 1550, 3100)), Share(0), Share(1), Share(2)],
            (30, 20.5, 20.5),
        ),
        # Of rows that are coarser than it takes, as many as are nearest.
        ([Sized(9, 3)], [0, 0], [Share(0, (0, 2, 3))], (6, 3)),
        # Two of two are not cut, and who has them has no others where all are whole.
        ([Sized(120, 40), Sized(67, 2)], [5, 5, 0], [Share(0, (0, 20, 40, 40)), Share(2)], (65, 65, 67)),
        # Another row there would be as much as is here.
        ([Sized(9, 3)], [0, 6], [Share(0)], (9, 6)),
        # One of coarse rows, though the largest, is left whole where others will do.
        ([Sized(6, 2), Sized(5, 500), Sized(5, 5)], [0, 0], [Share(0), Share(1, (0, 200, 500)), Share(1)], (8, 8)),
        ([Sized(6, 2), Sized(5, 50), Sized(5, 5)], [0, 0], [Share(0, (0, 1, 2)), Share(0), Share(1)], (8, 8)),
        # No rows; in Keras the kernel of a convolution with windows of 1 has one row.
        ([Sized(9)], [0, 0], [Share(0)], (9, 0)),
        ([Sized(9), Sized(4, 4)], [0, 0, 0], [Share(0), Share(1)], (9, 4, 0)),
        # Those without rows are no longer together when what was before them is cut.
        ([Sized(11, 44), Sized(10), Sized(10)], [0, 0], [Share(0, (0, 22, 44)), Share(0), Share(1)], (15.5, 15.5)),
    ],
)
def test_what_makes_shares_uneven_is_cut(
    variables: list[Sized], loads: list[int], shares: list[Share], kept: tuple[float, ...]
) -> None:
    large = [Sized(variable.nbytes * MIB, variable.rows) for variable in variables]
    found, left = share_out(large, [load * MIB for load in loads])
    assert [share.rows for share in found] == [share.rows for share in shares]
    assert list(found) == shares
    assert left == tuple(load * MIB for load in kept)


def test_what_is_small_is_never_cut() -> None:
    shares, loads = share_out([Sized(LEAST_CUT - 1, 64)] * 3, [0, 0])
    assert (shares, loads) == ((Share(0), Share(1), Share(0)), (2 * LEAST_CUT - 2, LEAST_CUT - 1))
    # Nor is a large one where a replica has half of that more than its part; it is where it has twice that more.
    shares, _ = share_out([Sized(LEAST_CUT, 64)], [0, 0])
    assert shares == (Share(0),)
    shares, loads = share_out([Sized(4 * LEAST_CUT, 64)], [0, 0])
    assert (shares, loads) == ((Share(0, (0, 32, 64)),), (2 * LEAST_CUT, 2 * LEAST_CUT))


def test_a_share_as_a_spread() -> None:
    assert Share(1).spread(3) == Whole("D", 1, 3)
    assert Share(1, (0, 20, 30)).spread(2) == SplitOver("D", 0, (0, 20, 30), keeper=1)


def test_shares_within_a_hundredth_are_left_as_they_are() -> None:
    within, beyond = ([Sized((100 + more) * MIB, 1000), Sized((100 - more) * MIB, 1000)] for more in (1, 2))
    assert share_out(within, [0, 0])[0] == (Share(0), Share(1))
    assert share_out(beyond, [0, 0])[0] == (Share(1, (0, 20, 1000)), Share(0))


sizes_in_bytes = st.one_of(st.integers(1, 4 * LEAST_CUT), st.integers(1, 64 * MIB))
anything = st.lists(st.builds(Sized, sizes_in_bytes, st.integers(0, 3000)), max_size=12)
with_rows = st.lists(st.builds(Sized, sizes_in_bytes, st.integers(2, 3000)), max_size=12)
before = st.one_of(
    st.integers(1, 9).map(lambda replicas: [0] * replicas), st.lists(st.integers(0, 64 * MIB), min_size=1, max_size=9)
)


@given(anything, before)
@settings(deadline=None)
def test_every_row_is_with_one_replica_and_loads_are_what_shares_say(variables: list[Sized], loads: list[int]) -> None:
    shares, kept = share_out(variables, loads)
    wanted = [float(load) for load in loads]
    for variable, share in zip(variables, shares, strict=True):
        assert 0 <= share.replica < len(loads)
        if share.rows is None:
            wanted[share.replica] += variable.nbytes
            continue
        assert variable.nbytes >= LEAST_CUT
        assert (share.rows[0], share.rows[-1], len(share.rows)) == (0, variable.rows, len(loads) + 1)
        counts = [end - begin for begin, end in itertools.pairwise(share.rows)]
        assert min(counts) >= 0
        # What one has all rows of is whole.
        assert max(counts) < variable.rows
        wanted = [load + variable.nbytes * count / variable.rows for load, count in zip(wanted, counts, strict=True)]
    assert kept == pytest.approx(wanted)
    assert (shares, kept) == share_out(list(variables), tuple(loads))


@given(with_rows, before)
@settings(deadline=None)
def test_shares_are_even_to_a_hundredth_and_a_row(variables: list[Sized], loads: list[int]) -> None:
    part = (sum(loads) + sum(variable.nbytes for variable in variables)) / len(loads)
    row = max((v.nbytes / v.rows for v in variables if v.nbytes >= LEAST_CUT), default=0.0)
    _, kept = share_out(variables, loads)
    assert max(kept) <= max(part, *loads) + max(0.01 * part, LEAST_CUT) + row + 1e-3


@given(anything, before)
@settings(deadline=None)
def test_no_cut_makes_the_largest_share_larger(variables: list[Sized], loads: list[int]) -> None:
    _, kept = share_out(variables, loads)
    _, whole = share_out([Sized(variable.nbytes) for variable in variables], loads)
    assert max(kept) <= max(whole)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
@settings(deadline=None)
def test_without_rows_the_largest_share_is_at_most_four_thirds_of_the_best(sizes: list[int], replicas: int) -> None:
    best = min(
        max(sum(s for s, r in zip(sizes, chosen, strict=True) if r == replica) for replica in range(replicas))
        for chosen in itertools.product(range(replicas), repeat=len(sizes))
    )
    _, kept = share_out([Sized(size) for size in sizes], [0] * replicas)
    assert best <= max(kept) <= best * 4 / 3


def of_gpt(width: int, layers: int, words: int = 0) -> list[Sized]:
    """Weights of layers of GPT-2, and of its embeddings where there are words."""
    embeddings = [(words, width), (1024, width)] if words else []
    norms = [(width,)] * 4
    attention = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    feed_forward = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [Sized(4 * math.prod(shape), shape[0]) for shape in embeddings + (norms + attention + feed_forward) * layers]


@pytest.mark.parametrize(
    "stage",
    [of_gpt(768, 12, 50257), of_gpt(1024, 12, 50257), of_gpt(1600, 12, 50257), of_gpt(1600, 12)],
    ids=["gpt2", "half of gpt2-medium", "quarter of gpt2-xl", "another quarter"],
)
def test_replicas_keep_equal_shares_of_a_gpt(stage: list[Sized]) -> None:
    for replicas in range(2, 65):
        _, kept = share_out(stage, [0] * replicas)
        assert max(kept) <= 1.02 * sum(kept) / replicas, replicas


@pytest.mark.parametrize("rows", [1, 2, 1024])
def test_thousands_of_weights_for_hundreds_of_replicas_are_cut_no_more_than_it_takes(rows: int) -> None:
    shares, _ = share_out([Sized(4 * MIB, rows)] * 2000, [0] * 256)
    # Seven on each are left whole; where that cannot be, some have eight.
    assert sum(share.rows is not None for share in shares) == {1: 0, 2: 0, 1024: 208}[rows]


@pytest.mark.parametrize(
    ("variables", "slots", "replicas", "wanted"),
    [
        ([], [], 3, 0),
        ([Sized(8, 8), Sized(2, 2)], [16, 4], 1, 20),
        # Whole: of no weight there is a copy.
        ([Sized(8), Sized(4), Sized(2)], [16, 8, 4], 2, 16),
        # Five rows of eight; the other replica has three, and what is whole.
        ([Sized(8, 8), Sized(2, 2)], [16, 4], 2, 10),
        ([Sized(8, 8)], [0], 2, 0),
        # Shares are of weights, and slots may be of another size.
        ([Sized(8, 8), Sized(5, 1)], [8, 10], 2, 12),
    ],
)
def test_the_fullest_replica_has_slots_of_what_is_whole_and_of_rows(
    variables: list[Sized], slots: list[int], replicas: int, wanted: int
) -> None:
    large = [Sized(variable.nbytes * MIB, variable.rows) for variable in variables]
    assert fullest_share(large, [each * MIB for each in slots], replicas) == wanted * MIB


def test_a_gpt_of_the_docs_has_the_slots_that_they_say() -> None:
    """docs/how_it_works.md: Adam's slots of GPT-2 (small), all, of eight replicas, and of its embedding whole."""
    stage = of_gpt(768, 12, 50257)
    slots = [2 * weight.nbytes for weight in stage]
    assert [round(fullest_share(stage, slots, replicas) / MIB) for replicas in (1, 8)] == [949, 119]
    whole = [Sized(weight.nbytes) for weight in stage]
    assert round(fullest_share(whole, slots, 8) / MIB) == 294
