"""A sum over stages is a list of tasks, whose order is proved like that of any other."""

from __future__ import annotations

import pytest

from smp_tf.pipeline.errors import ProgramError
from smp_tf.pipeline.programs.check import check
from smp_tf.pipeline.programs.simulate import simulate
from smp_tf.pipeline.programs.stage_sums import stage_sum
from smp_tf.pipeline.programs.text import parse
from smp_tf.pipeline.task import Program


def program(*lists: str) -> Program:
    return Program(tuple(tuple(map(parse, own.split())) for own in lists), microbatches=0, chunks=0, sweeps=0)


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_it_ends(stages: int) -> None:
    check(stage_sum(stages))


def test_its_tasks() -> None:
    assert stage_sum(3) == program("0SUM", "1TELL 1SUM", "2TELL 2SUM")


def test_everybody_waits_for_the_slowest() -> None:
    once = {parse("1TELL"): 2.0, parse("2TELL"): 5.0, parse("0SUM"): 1.0}
    found = simulate(stage_sum(3), once=once)
    assert [found.span_of(parse(task)).end for task in ("0SUM", "1SUM", "2SUM")] == [6.0] * 3


@pytest.mark.parametrize(
    ("lists", "told"),
    [
        (("0SUM", "1SUM 1TELL"), "1SUM before 1TELL on rank 1"),
        (("0SUM", "1TELL 1SUM", "2SUM"), "0SUM on rank 0 needs 2TELL, which no rank does"),
        (("0SUM", "1TELL 1SUM 0SUM"), "0SUM on rank 1"),
    ],
)
def test_ranks_that_disagree_are_told(lists: tuple[str, ...], told: str) -> None:
    with pytest.raises(ProgramError, match=told):
        check(program(*lists))
