"""The benchmark of memory: its table, its options, and a run on the smallest of its models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.conftest import Refuse
from tests.benchmarks.test_start_time import printed
from tests.distributed import memory_models

MIB = 2**20
ROWS = [
    {
        "model": "gpt",
        "pipeline": "simple",
        "whole": 200 * MIB,
        "ranks": [
            {"forecast": {"stored_bytes": 120 * MIB}, "counted": 110 * MIB, "peak": 100 * MIB},
            {"forecast": {"stored_bytes": 1080 * MIB}, "counted": 1080 * MIB, "peak": 1200 * MIB},
        ],
    }
]


def test_the_table_has_the_forecast_and_one_process_beside_what_was_counted() -> None:
    from memory import table_of

    assert printed(table_of(ROWS, "about")) == [
        ["gpt", "simple", "0", "120.0", "110.0", "100.0", "1.10", "0.50"],
        ["", "", "1", "1,080.0", "1,080.0", "1,200.0", "0.90", "6.00"],
    ]


def test_what_files_hold_is_a_table_of_a_page(tmp_path: Path) -> None:
    from memory import markdown

    settings = {"without_onednn": False, "all_tensors": True}
    measured = {"settings": settings, "machine": {"commit": "abc1234"}, "rows": ROWS}
    file = tmp_path / "memory.json"
    file.write_text(json.dumps(measured))
    assert markdown([file]) == [
        "| model | counts | commit | rank 0: forecast, counted, peak, MiB | rank 0: counted / peak"
        " | rank 1: forecast, counted, peak, MiB | rank 1: counted / peak |",
        "|---|---|---|---|---|---|---|",
        "| `gpt, simple` | all | abc1234 | 120, 110, 100 | 1.10 | 1,080, 1,080, 1,200 | 0.90 |",
    ]


def test_without_onednn_another_allocator_counts() -> None:
    from memory import arguments, variables

    assert variables(arguments([])) == {"TF_ENABLE_ONEDNN_OPTS": "1"}
    assert variables(arguments(["--without-onednn"])) == {
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
    }


def test_every_model_of_the_tests_is_measured() -> None:
    from memory import MODELS, arguments

    assert set(MODELS) == set(memory_models.MODELS)
    assert arguments([]).models == list(MODELS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--models", "gpt,alexnet"], "models are gpt, conv, mlp, deep, lstm, resnet50, digits, language_model, recom"),
        (["--models", "gpt,alexnet"], "Received: alexnet"),
        (["--pipelines", "fast"], "pipelines are simple, interleaved, zb_h1. Received: fast"),
        (["--partitions", "1"], "--partitions is 2 or more; one process is measured beside it. Received: 1"),
    ],
)
def test_bad_options_are_told(refuse: Refuse, options: list[str], words: str) -> None:
    refuse("memory", options, words)
