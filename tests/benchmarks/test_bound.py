"""The benchmark of how close a step comes to its bounds: its figures from literal timelines, and a small run."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from smp_tf.pipeline.measure.step_anatomy import PARTS, StepAnatomy
from smp_tf.pipeline.programs.check import check
from smp_tf.pipeline.programs.chunk_times import ChunkTimes
from smp_tf.pipeline.programs.simulate import simulate
from smp_tf.pipeline.programs.text import parse_program
from tests.benchmarks.conftest import Refuse
from tests.benchmarks.test_start_time import printed
from tests.pipeline.recorded_steps import program, recorded

MS = 1_000_000


def step_of(schedule: str, comm: int = 0) -> StepAnatomy:
    planned = program(2, 4, schedule)
    steps, _ = recorded(planned, [ChunkTimes(10 * MS, 10 * MS, 10 * MS)] * 2, comm=comm * MS)
    return StepAnatomy(planned, steps)


@pytest.mark.parametrize(("schedule", "simulated"), [("interleaved", 0.150), ("zb_h1", 0.130)])
def test_a_step_without_delays_is_as_simulated_and_at_its_bound(schedule: str, simulated: float) -> None:
    from bound import seen

    told = seen([step_of(schedule)], simulated, 4)
    for ratio in ("over_simulated", "over_bound", "tasks_over_simulated"):
        assert told[ratio] == pytest.approx(1.0), ratio
    assert told["parts"]["compute"] == pytest.approx(0.120 / simulated)
    assert told["parts"]["bubble"] == pytest.approx(told["simulated_bubble"]) == pytest.approx(1 - 0.120 / simulated)
    assert told["task_seconds"] == pytest.approx(0.010)
    assert told["work_seconds"] == pytest.approx(0.240)


def test_what_messages_and_the_rest_take_is_over_both() -> None:
    from bound import seen

    told = seen([step_of("interleaved", comm=3)], 0.165, 4)
    # 0B0 waits for one message there and one back; 1F2, 0B2 and 0B3 for what the one before could not hide.
    assert told["tasks_over_simulated"] == pytest.approx(162 / 150)
    assert told["over_simulated"] == told["over_bound"] == pytest.approx(165 / 150)
    assert told["parts"]["message"] == pytest.approx((9 + 6) / (2 * 162))


def test_work_is_measured_where_no_two_ranks_compute_at_once() -> None:
    from bound import serial_schedule

    order = parse_program(serial_schedule(3, 2))
    check(order)
    begun = sorted((span.start, span.end) for spans in simulate(order).spans for span in spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(begun))
    assert begun[-1][1] == 3 * 2 * (1.0 + 2.0)


def turn(seconds: float, **more: Any) -> dict[str, Any]:
    return {"seconds": seconds, **more}


def pipeline_turn(seconds: float, over: float) -> dict[str, Any]:
    ratios = {"over_simulated": over, "over_bound": over, "tasks_over_simulated": over}
    parts = {**dict.fromkeys(PARTS, 0.0), "compute": 0.8, "bubble": 0.2}
    return turn(
        seconds, seen={**ratios, "simulated_bubble": 0.2, "task_seconds": 0.025, "work_seconds": 2.0, "parts": parts}
    )


def test_the_table_has_ratios_of_pairs() -> None:
    from bound import figures, tables_of

    turns = {
        "1": [turn(2.0), turn(4.0)],
        "n": [turn(1.0), turn(2.0)],
        "p": [pipeline_turn(0.5, 1.0), pipeline_turn(2.0, 1.5)],
        "s": [pipeline_turn(1.0, 1.0)] * 2,
    }
    found = figures(turns, {"1": [90], "n": [100], "p": [60, 80], "s": [60, 60]})
    # The ratios of the medians would be 1.5 / 1.25 and 2 / 3.
    assert found["speed"]["p"]["all"] == [2.0, 1.0]
    assert found["work_over_one_thread"]["all"] == [1.0, 0.5]
    assert found["memory_over_all_threads"]["p"] == [0.7, 0.8]
    steps, rest = tables_of("small", {4: found})
    assert printed(steps)[2] == [
        "", "(p)", "1,250 (875 – 1,625)", *["1.25 (1.12 – 1.38)"] * 3, "1.50 (1.25 – 1.75)", "mean 0.70, most 0.80",
    ]  # fmt: skip
    assert printed(rest) == [
        ["4", "(p)", "80.0", "20.0", *["0.0"] * 5, "20.0", "25", ""],
        ["4", "(s)", "80.0", "20.0", *["0.0"] * 5, "20.0", "25", "0.75 (0.62 – 0.88)"],
    ]


def test_without_what_takes_one_core_the_first_row_is_that_of_all_threads() -> None:
    from bound import figures, tables_of

    turns = {"n": [turn(1.0), turn(2.0)], "p": [pipeline_turn(0.5, 1.0), pipeline_turn(2.0, 1.5)]}
    found = figures(turns, {"n": [100], "p": [60, 80]})
    assert "work_over_one_thread" not in found
    steps, rest = tables_of("small", {4: found})
    assert [row[:2] for row in printed(steps)] == [["4", "(n)"], ["", "(p)"]]
    assert [row[:2] for row in printed(rest)] == [["4", "(p)"]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sizes", "huge"], "Sizes are tiny, small"),
        (["--sizes", "conv+heads=2"], "of depth, width, pixels, classes, batch"),
        (["--microbatches", "3"], "has 16 samples, and every number of microbatches has to divide it. Received: 3"),
        (["--microbatches", "two"], "expected rising numbers from 1 on"),
        (["--partitions", "1"], "a pipeline has two ranks or more"),
    ],
)
def test_bad_options_are_told(refuse: Refuse, options: list[str], words: str) -> None:
    refuse("bound", options, words)
