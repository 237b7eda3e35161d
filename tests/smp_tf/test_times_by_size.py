"""The times of a size that was not measured lie on lines through those that were."""

from __future__ import annotations

import pytest

from smp_tf.times_by_size import times_for

MEASURED = {
    2: {"net/a": (1.0, 4.0), "net/b": (2.0, 2.0)},
    4: {"net/a": (2.0, 6.0), "net/b": (2.0, 1.0)},
    16: {"net/a": (14.0, 30.0), "net/b": (2.0, 0.0)},
}


@pytest.mark.parametrize(
    ("samples", "of_a", "of_b"),
    [
        (2, (1.0, 4.0), (2.0, 2.0)),  # as measured
        (4, (2.0, 6.0), (2.0, 1.0)),
        (3, (1.5, 5.0), (2.0, 1.5)),  # between two
        (10, (8.0, 18.0), (2.0, 0.5)),
        (1, (0.5, 3.0), (2.0, 2.5)),  # beyond them
        (28, (26.0, 54.0), (2.0, 0.0)),  # where nothing takes less than no time
    ],
)
def test_a_size_lies_on_the_line_through_its_neighbours(
    samples: int, of_a: tuple[float, float], of_b: tuple[float, float]
) -> None:
    found = times_for(samples, MEASURED)
    assert found["net/a"] == pytest.approx(of_a)
    assert found["net/b"] == pytest.approx(of_b)


def test_one_size_says_nothing_of_another() -> None:
    one = {4: MEASURED[4]}
    assert times_for(4, one) == MEASURED[4]
    assert times_for(8, one) == {}
    assert times_for(8, {}) == {}


def test_a_unit_that_one_size_lacks_has_no_times() -> None:
    lacking = {**MEASURED, 16: {"net/a": (14.0, 30.0)}}
    assert list(times_for(8, lacking)) == ["net/a"]
