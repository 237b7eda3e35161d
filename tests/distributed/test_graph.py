"""One function per rank: after the first step TensorFlow runs the pipeline alone."""

from __future__ import annotations

import pytest

from tests.distributed.harness import Case, CaseResult, launch

pytestmark = pytest.mark.alone

CASES = "tests.distributed.cases.graph"
# Per stage and microbatch a stash of three layers' activations: 3 x (samples x width) floats.
WIDTH, SAMPLES = 64, 8 * 2048
ACTIVATION = SAMPLES // 8 * WIDTH * 4


def config(microbatches: int, schedule: str = "interleaved") -> dict[str, object]:
    return {"microbatches": microbatches, "pipeline": schedule, "check_inputs": False, "seed": 1}


@pytest.fixture(scope="module")
def results() -> dict[str, CaseResult]:
    """All cases, in one launch of two processes; the start-up times in turns."""
    big = {"width": WIDTH, "samples": SAMPLES}
    cases = [
        Case("program-4", "program", {}, config(4)),
        Case("program-8", "program", {}, config(8)),
        Case("idle", "idle", {"seconds": 3.0}, config(4)),
        *(Case(f"start-{m}-{n}", "start_time", {"blocks": 1}, config(m)) for n in range(3) for m in (8, 64)),
        *(
            Case(f"peak-{schedule}", "peak_of_a_step", big, config(8, schedule))
            for schedule in ("simple", "interleaved")
        ),
    ]
    # TensorFlow counts the bytes of tensors only where oneDNN's allocator is in use.
    return launch(2, CASES, cases, environment={"TF_ENABLE_ONEDNN_OPTS": "1", "HOROVOD_CYCLE_TIME": ""})


@pytest.mark.parametrize("microbatches", [4, 8])
def test_a_step_runs_without_python_and_without_horovod(results: dict[str, CaseResult], microbatches: int) -> None:
    for rank, told in enumerate(results[f"program-{microbatches}"].values()):
        assert told["horovod"] == 0
        assert told["python_ops"] == 0
        assert told["traced_again"] == 0
        assert told["own_calls"] == 0
        # Rank 0 sends activations and gets gradients and losses; rank 1 the other way round.
        forward, back = microbatches, 2 * microbatches
        expected = (forward, back) if rank == 0 else (back, forward)
        assert (told["sends"], told["receives"]) == expected


def test_python_does_the_same_for_any_number_of_microbatches(
    results: dict[str, CaseResult],
) -> None:
    few, many = results["program-4"].values(), results["program-8"].values()
    assert [r["calls"] for r in few] == [r["calls"] for r in many]
    assert [r["functions"] for r in few] == [r["functions"] for r in many]


def test_64_microbatches_start_in_less_than_twice_the_time_of_8(
    results: dict[str, CaseResult],
) -> None:
    best = {m: min(max(r["seconds"] for r in results[f"start-{m}-{n}"].values()) for n in range(3)) for m in (8, 64)}
    assert best[64] < 2 * best[8], best


def test_live_activations_are_what_the_schedule_says(results: dict[str, CaseResult]) -> None:
    # Of 8 microbatches "simple" keeps 8 on each rank; 1F1B keeps min(2 - r, 8) on rank r.
    simple = [r["bytes"] for r in results["peak-simple"].values()]
    interleaved = [r["bytes"] for r in results["peak-interleaved"].values()]
    for rank, live in enumerate((2, 1)):
        saved = (simple[rank] - interleaved[rank]) / ACTIVATION
        per_microbatch = saved / (8 - live)
        assert 2.5 <= per_microbatch <= 4.5, (rank, saved, simple, interleaved)


def test_a_rank_that_waits_costs_next_to_nothing(results: dict[str, CaseResult]) -> None:
    """Horovod's thread once looked for work every millisecond, for a fifth of a core."""
    assert all(r["share"] < 0.04 for r in results["idle"].values()), results["idle"].values()
