"""What the orders' own page shows, and the groups of interleaved 1F1B."""

from __future__ import annotations

import re

import pytest

from smp_tf.pipeline.programs.draw import draw
from smp_tf.pipeline.programs.simulate import simulate
from smp_tf.pipeline.schedules import orders
from smp_tf.pipeline.schedules.schedule import build


def test_the_middle_rank_is_drawn_as_it_is() -> None:
    assert orders.__doc__ is not None
    for kind in ("simple", "interleaved", "zb_h1"):
        tasks = " ".join(str(task)[1:] for task in build(kind, 3, 4).ranks[1])
        assert re.search(rf"^    {kind} +{tasks}(   |$)", orders.__doc__, re.MULTILINE)


def test_chunks_are_drawn_as_they_are() -> None:
    assert orders.interleaved_1f1b.__doc__ is not None
    drawn = draw(simulate(build("interleaved_1f1b", 2, 4))).splitlines()
    for row, whole in zip(re.findall(r"rank \d .*(?= \.\.\.)", orders.interleaved_1f1b.__doc__), drawn, strict=True):
        assert whole.startswith(row)


@pytest.mark.parametrize(
    ("stages", "microbatches", "sizes"),
    [(4, 8, [4, 4]), (4, 11, [5, 6]), (4, 7, [7]), (4, 3, [3]), (1, 3, [1, 1, 1]), (3, 10, [3, 3, 4])],
)
def test_groups(stages: int, microbatches: int, sizes: list[int]) -> None:
    groups = orders._groups(stages, microbatches)
    assert list(map(len, groups)) == sizes
    assert [each for group in groups for each in group] == list(range(microbatches))
