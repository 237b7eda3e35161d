"""Which rank runs which chunk."""

from __future__ import annotations

from smp_tf.pipeline.schedules import placements
from smp_tf.pipeline.schedules.placements import in_a_v, looped


def test_chunks_are_dealt_out() -> None:
    assert looped(3) == (0, 1, 2)
    assert looped(2, 3) == (0, 1, 0, 1, 0, 1)
    assert in_a_v(3) == (0, 1, 2, 2, 1, 0)
    assert in_a_v(1) == (0, 0)
    assert in_a_v(2, 4) == (0, 1, 1, 0, 0, 1, 1, 0)


def test_the_drawing_is_so() -> None:
    assert placements.__doc__ is not None
    rows = [line.replace("-", " ").split()[2:] for line in placements.__doc__.splitlines() if "    rank" in line]
    for rank, row in enumerate(rows):
        shown = list(map(int, row))
        assert shown == [chunk for where in (looped(3, 2), in_a_v(3)) for chunk, at in enumerate(where) if at == rank]
