"""The benchmark: its figures from literal measurements, and a run on a model of next to no size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.harness import launch_script


def test_figures_come_from_pairs_of_one_repetition() -> None:
    from harness.report import summary

    figures = summary(
        {
            "tokens": 100,
            "turns": {"a": [1.0, 1.0, 1.0], "b": [2.0, 4.0, 8.0], "c": [4.0, 5.0, 8.0]},
            "bounds": [{"alone": 2.0}, {"alone": 4.0}, {"alone": 4.0}],
        }
    )
    assert figures["step_seconds"]["c"]["median"] == 5.0
    assert figures["step_seconds"]["c"]["quartiles"] == [4.5, 6.5]
    assert figures["tokens_per_second"] == {"a": 100.0, "b": 25.0, "c": 20.0}
    # The ratio of the medians would be 4 / 5 as well; of the pairs the last is 1.
    assert figures["speed_against_b"]["c"]["all"] == [0.5, 0.8, 1.0]
    assert figures["step_over_bound"]["alone"]["all"] == [2.0, 1.25, 2.0]


def test_the_bound_is_that_of_the_slowest_way_through() -> None:
    from step_time import bound

    times = [{"forward": 1.0, "backward": 2.0}, {"forward": 2.0, "backward": 3.0}]
    # Stage 1 works 4 x 5, and its first microbatch passes stage 0 before and after.
    assert bound(times, 4, cores=2) == 23.0
    assert bound(times, 4, cores=1) == 32.0


@pytest.mark.distributed
@pytest.mark.full
def test_a_process_that_ends_is_an_error_with_its_last_words() -> None:
    from harness.fleet import Crew, TrainerError

    with pytest.raises(TrainerError, match="KeyError: 'no such way'"):
        Crew("no such way", ["tiny", "2", "1", json.dumps({"policy": "float32", "xla": False})], 1, patience=60.0)


@pytest.mark.distributed
@pytest.mark.full
@pytest.mark.parametrize("more", ["", "--xla --policy mixed_bfloat16"])
def test_a_run_writes_everything_down(tmp_path: Path, more: str) -> None:
    out = tmp_path / "out.json"
    options = (
        f"--sizes tiny --repetitions 2 --microbatches 2 --turn 0.05 --threads 2 {more} --patience 120 --json {out}"
    )
    ran = launch_script(1, "benchmarks/step_time.py", options.split(), launched=False)
    assert "(c) pipeline" in ran.expect_clean().output(0)
    assert ("mixed_bfloat16, compiled by XLA" in ran.output(0)) == bool(more)
    result = json.loads(out.read_text())
    assert result["settings"]["intra_op_threads"] == {"a": 2, "b": 2, "c": 1}
    assert result["machine"]["packages"].keys() >= {"tf-keras", "horovod", "numpy"}
    figures = result["sizes"]["tiny"]
    for way in "abc":
        assert len(figures["step_seconds"][way]["all"]) == 2
        assert figures["step_seconds"][way]["median"] > 0
        assert figures["last_loss"][way] == pytest.approx(figures["last_loss"]["a"], rel=1e-2 if more else 1e-3)
    assert [memory["forecast"]["all"] > 0 for memory in figures["memory"]["c"]] == [True, True]
    for rank in figures["first_step_seconds"]["c"]:
        assert rank.keys() == {"start", "trace", "plan", "build", "graph", "first execution"}
        assert min(rank.values()) > 0
    assert len(figures["stage_seconds"]["alone"]) == 2
