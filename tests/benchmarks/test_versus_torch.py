"""The benchmark beside PyTorch's pipelines: all of it that needs no PyTorch, and a run where there is one."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from smp_tf.pipeline.programs.chunk_times import ChunkTimes
from smp_tf.pipeline.schedules.schedule import build
from tests.benchmarks.conftest import Refuse
from tests.partition.plan.test_report import cells

MIB = 2**20


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("gpipe", (0, 1)),
        ("1f1b", (0, 1)),
        ("interleaved", (0, 1, 0, 1)),
        ("zb_h1", (0, 1)),
        ("zb_v", (0, 1, 1, 0)),
    ],
)
def test_both_libraries_have_their_chunks_on_the_same_ranks(name: str, placement: tuple[int, ...]) -> None:
    from versus.settings import PAIRS

    pair = PAIRS[name]
    assert pair.placement(2) == placement
    assert build(pair.smp, stages=2, microbatches=4, chunks_per_rank=pair.chunks).placement() == placement


def test_torch_is_cut_between_the_halves_of_blocks_that_are_nearest() -> None:
    from versus.cut import pieces_of

    first, second = "gpt/block", "gpt/block_1"
    layers = {
        "gpt/embedding": 0,
        f"{first}/layer_normalization": 0,
        f"{first}/multi_head_attention/query": 1,
        f"{first}/multi_head_attention/attention_output": 1,
        f"{first}/layer_normalization_1": 1,
        f"{first}/dense": 2,
        f"{first}/dense_1": 2,
        f"{second}/multi_head_attention_1/query": 2,
        f"{second}/multi_head_attention_1 #2": 2,
        f"{second}/multi_head_attention_1/attention_output": 2,
        f"{second}/dense_2": 2,
        "gpt/layer_normalization_4": 2,
        "gpt/dense_4": 3,
    }
    # Norms do not count: that of the first attention is before the cut, and that of the output layer too.
    assert pieces_of(layers, depth=2) == [1, 1, 3, 1]
    with pytest.raises(ValueError, match=r"at least one\. Received: \[2, 0, 3, 1\] halves for 2 blocks"):
        pieces_of(
            {**layers, f"{first}/multi_head_attention/query": 0, f"{first}/layer_normalization_1": 2}
            | {f"{first}/multi_head_attention/attention_output": 0},
            depth=2,
        )


def test_torch_may_be_balanced_by_its_own_work() -> None:
    from versus.cut import balanced, work_of

    size = {"depth": 2, "width": 10, "length": 5, "vocabulary": 100}
    assert work_of(size) == [0.0, 1000.0, 1600.0, 1000.0, 1600.0, 2000.0]
    assert balanced(work_of(size), 3) == [3, 2, 1]
    assert balanced(work_of(size), 2) == [4, 2]
    assert balanced([1.0, 1.0, 9.0], 3) == [1, 1, 1]


def test_times_of_tasks_are_medians_and_a_whole_backward_pass_is_waited_for_by_nobody() -> None:
    from versus.report import chunk_times

    tasks = [("F", 0, 1.0), ("F", 0, 9.0), ("F", 0, 2.0), ("B", 0, 3.0), ("F", 1, 4.0), ("I", 1, 5.0), ("W", 1, 6.0)]
    assert chunk_times(tasks, 2) == [ChunkTimes(2.0, 0.0, 3.0), ChunkTimes(4.0, 5.0, 6.0)]
    # As of torch's first stage, whose gradients are all made at W.
    assert chunk_times([("F", 0, 1.0), ("I", 0, 0.0), ("W", 0, 2.0)], 1) == [ChunkTimes(1.0, 0.0, 2.0)]
    with pytest.raises(ValueError, match=r"Received: of chunk 1, no task"):
        chunk_times(tasks[:4], 2)


@pytest.mark.parametrize(
    ("name", "bound"),
    [("gpipe", 33.0), ("1f1b", 33.0), ("interleaved", 28.5), ("zb_h1", 27.0), ("zb_v", 25.5)],
)
def test_the_bound_shares_out_the_time_of_one_process(name: str, bound: float) -> None:
    from versus.report import bounds
    from versus.settings import PAIRS

    # Twice as slow in the pipeline as alone, where F, I and W of a rank's share take 1 each: 8 x 4 x 3.
    pair = PAIRS[name]
    times = [ChunkTimes(2.0 / pair.chunks, 2.0 / pair.chunks, 2.0 / pair.chunks)] * (4 * pair.chunks)
    found = bounds(times, 96.0, pair, microbatches=8, processes=4, cores=4)
    assert found == {"serial": bound, "tasks": 2 * bound}
    assert bounds(times, 96.0, pair, microbatches=8, processes=4, cores=2)["serial"] == 48.0


def rank_of(tasks: list[tuple[str, int, float]], resident: int, sent: int) -> dict[str, Any]:
    return {
        "tasks": tasks,
        "cpu_seconds": 20.0,
        "resident_peak": resident * MIB,
        "resident_before_model": 100 * MIB,
        "sent_bytes": sent * MIB,
    }


def measured(steps: dict[str, list[float]]) -> dict[str, Any]:
    """Two chunks of F = 2 and B = 4, four microbatches: a bound of 30; alone twice as fast, a bound of 15."""
    ranks = [
        rank_of([("F", 0, 2.0), ("B", 0, 4.0)], 300, 8),
        rank_of([("F", 1, 2.0), ("B", 1, 4.0)], 250, 4),
    ]
    return {
        "schedule": "1f1b",
        "microbatches": 4,
        "processes": 2,
        "cores": 2,
        "steps": 2,
        "turns": {
            name: [{"serial": 24.0, "step": step, "ranks": ranks} for step in taken] for name, taken in steps.items()
        },
    }


def test_fractions_are_of_each_frameworks_own_bound() -> None:
    from versus.report import figures

    found = figures(measured({"smp_tf": [20.0, 30.0, 15.0], "torch": [25.0, 15.0, 25.0]}))
    of = found["smp_tf"]
    assert of["of_bound"]["all"] == [0.75, 0.5, 1.0]
    assert of["of_tasks_bound"]["all"] == [1.5, 1.0, 2.0]
    assert of["speed_up"]["all"] == [1.2, 0.8, 1.6]
    assert of["cores_used"]["all"] == [1.0, pytest.approx(2 / 3), pytest.approx(4 / 3)]
    assert of["beyond_start"] == [200 * MIB, 150 * MIB]
    assert of["sent_bytes"] == [4 * MIB, 2 * MIB]
    assert found["torch"]["of_bound"]["all"] == [0.6, 1.0, 0.6]
    assert found["ahead"]["all"] == [pytest.approx(1.25), 0.5, pytest.approx(5 / 3)]


def test_the_table_says_who_is_ahead_whoever_it_is() -> None:
    from versus.report import figures, table_of

    won = figures(measured({"smp_tf": [20.0], "torch": [25.0]}))
    lost = figures(measured({"smp_tf": [30.0], "torch": [15.0]}))
    results = [{"processes": 2, "schedule": "1f1b", **found} for found in (won, lost)]
    console = Console(width=220, no_color=True)
    with console.capture() as capture:
        console.print(table_of("tiny", results, {"smp_tf": 400 * MIB, "torch": 30 * MIB}))
    rows = cells(capture.get())
    assert rows[0] == [
        *("2", "1F1B", "smp_tf", "24,000.0", "20,000.0 (20,000.0 – 20,000.0)", "1.20", "0.75 (0.75 – 0.75)"),
        *("1.50", "200, 150", "6.00", "smp_tf 1.25 (1.25 – 1.25)"),
    ]
    assert [row[2] for row in rows] == ["smp_tf", "torch"] * 2
    assert [row[-1] for row in rows[1:]] == ["", "", "torch 2.00 (2.00 – 2.00)"]
    assert "smp_tf's Keras 400, torch 30 MiB" in " ".join(capture.get().split())


def test_who_has_no_torch_is_told_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import versus_torch

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    told = versus_torch.torch_refusal(Namespace(torch_python=None))
    assert told is not None
    assert "torch-venv/bin/pip install torch==2.13.0" in told
    assert "\n" not in told
    told = versus_torch.torch_refusal(Namespace(torch_python=Path("/no/such/python")))
    assert told is not None
    assert told.startswith("--torch-python /no/such/python has no PyTorch (")
    assert "pip install torch==2.13.0" in told
    assert "\n" not in told


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--processes 1", "whole numbers from 2 on"),
        ("--schedules gpipe,dualpipe", "are of gpipe, 1f1b, interleaved, zb_h1, zb_v. Received: dualpipe"),
        ("--repetitions 0", "are 1 or more"),
        ("--processes 3", "is a multiple of all --processes"),
        ("--sizes huge", "A size is one of tiny"),
        ("--sizes tiny+depth=7", "a block for each of 8 chunks"),
        ("--json no/such/folder/file", "in a folder that is there"),
    ],
)
def test_bad_options_are_told(refuse: Refuse, options: str, words: str) -> None:
    refuse("versus_torch", options.split(), words)
