"""The times of a size that was not measured lie on lines through those that were."""

from __future__ import annotations

import pytest

from smp_tf.pipeline.planner.times_by_size import UnitTimes, other_sizes, times_for

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
        (1, (0.5, 3.0), (2.0, 2.0)),  # beyond them, where fewer samples take no longer
        (28, (26.0, 54.0), (2.0, 0.0)),  # nor more samples less long
    ],
)
def test_a_size_lies_on_the_line_through_its_neighbours(
    samples: int, of_a: tuple[float, float], of_b: tuple[float, float]
) -> None:
    found = times_for(samples, MEASURED).seconds
    assert found["net/a"] == pytest.approx(of_a)
    assert found["net/b"] == pytest.approx(of_b)
    assert times_for(samples, MEASURED).sizes == (() if samples in MEASURED else (2, 4, 16))


@pytest.mark.parametrize(
    ("samples", "measured", "expected"),
    [
        # Sixteen times as few samples take a sixteenth at the least, not less than nothing.
        (1, {16: (0.010, 0.020), 64: (0.048, 0.100)}, (0.000625, 0.00125)),
        (8, {16: (0.010, 0.020), 64: (0.048, 0.100)}, (0.005, 0.010)),
        (8, {16: (0.010, 0.020), 64: (0.022, 0.044)}, (0.008, 0.016)),
        # What noise makes of two times that are much alike is no reason for a time of zero.
        (32, {1: (0.0020, 0.0020), 2: (0.0019, 0.0020)}, (0.0019, 0.0020)),
    ],
)
def test_outside_of_what_was_measured_the_line_goes_as_far_as_it_can(
    samples: int, measured: dict[int, tuple[float, float]], expected: tuple[float, float]
) -> None:
    found = times_for(samples, {size: {"net/a": seconds} for size, seconds in measured.items()}).seconds
    assert found["net/a"] == pytest.approx(expected)


def test_one_size_says_nothing_of_another() -> None:
    one = {4: MEASURED[4]}
    assert times_for(4, one) == UnitTimes(MEASURED[4])
    assert times_for(8, one) == UnitTimes()
    assert times_for(8, {}) == UnitTimes()


def test_a_unit_that_one_size_lacks_has_no_times() -> None:
    lacking = {**MEASURED, 16: {"net/a": (14.0, 30.0)}}
    assert list(times_for(8, lacking).seconds) == ["net/a"]


def test_the_sizes_that_were_measured_are_said_in_words() -> None:
    assert other_sizes([4, 1, 16]) == "other sizes of a microbatch, 1 to 16 samples"
