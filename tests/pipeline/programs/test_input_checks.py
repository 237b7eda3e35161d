"""The check of the batch is a task of every rank: the first one's needs those of all others, and nothing needs it."""

from __future__ import annotations

import pytest

from smp_tf.pipeline.errors import ProgramError
from smp_tf.pipeline.programs.check import check
from smp_tf.pipeline.programs.chunk_times import ChunkTimes
from smp_tf.pipeline.programs.input_checks import add_input_checks
from smp_tf.pipeline.programs.shared_host import Sharing, simulate_on_hosts
from smp_tf.pipeline.programs.simulate import simulate
from smp_tf.pipeline.programs.text import parse, parse_program

LINES = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"


def test_every_rank_has_one() -> None:
    program = add_input_checks(parse_program(LINES))
    assert program.text() == "0F0 0F1 0B0 0B1 0CHECK\n1F0 1B0 1F1 1B1 1CHECK"
    check(program)
    alone = parse_program("0F0 0B0")
    assert add_input_checks(alone) is alone


def test_one_that_another_rank_lacks_is_told() -> None:
    with pytest.raises(ProgramError, match="0CHECK on rank 0 needs 1CHECK, which no rank does"):
        check(parse_program("0F0 0F1 0B0 0B1 0CHECK\n1F0 1B0 1F1 1B1"))
    with pytest.raises(ProgramError, match="Received: 0CHECK on rank 1"):
        check(parse_program("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1 0CHECK"))


def test_neither_the_pipeline_nor_averages_wait_for_it() -> None:
    program = parse_program("0CHECK 0F0 0F1 0B0 0B1 0REDUCE0\n1CHECK 1F0 1B0 1F1 1B1 1REDUCE0")
    check(program)
    once = {parse("0CHECK"): 1.0, parse("1CHECK"): 2.0, parse("0REDUCE0"): 0.5}
    first = simulate(program, once=once)
    shared = simulate_on_hosts(program, ChunkTimes(), None, Sharing((0, 1), 1.0, 1.0), once=once)
    assert first == shared
    assert (first.computed, first.step_time) == (9.0, 9.5)
    assert [first.span_of(parse(task)).end for task in ("1CHECK", "0CHECK")] == [2.0, 3.0]
    assert simulate(program, once={parse("1CHECK"): 20.0}).step_time == 20.0
