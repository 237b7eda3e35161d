"""The bytes of units at a size that was not measured lie on lines through those that were."""

from __future__ import annotations

import pytest

from smp_tf.pipeline.planner.unit_peaks import UnitPeaks, peaks_for

MEASURED = {
    2: UnitPeaks({"net/a": (100, 400), "net/b": (200, 250)}, 64),
    4: UnitPeaks({"net/a": (200, 600), "net/b": (200, 150)}, 64),
}


@pytest.mark.parametrize(
    ("samples", "of_a", "of_b"),
    [
        (2, (100, 400), (200, 250)),  # as measured
        (3, (150, 500), (200, 200)),  # between two
        (8, (400, 1000), (200, 0)),  # beyond them; never below nothing
    ],
)
def test_a_size_lies_on_the_line_through_its_neighbours(
    samples: int, of_a: tuple[int, int], of_b: tuple[int, int]
) -> None:
    assert peaks_for(samples, MEASURED) == UnitPeaks({"net/a": of_a, "net/b": of_b}, 64)


def test_one_size_says_nothing_of_others_nor_do_sizes_that_were_counted_differently() -> None:
    assert peaks_for(3, {2: MEASURED[2]}) == UnitPeaks()
    assert peaks_for(3, {2: MEASURED[2], 4: UnitPeaks({"net/a": (1, 1)}, 0)}) == UnitPeaks()
