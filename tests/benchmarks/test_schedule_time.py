"""The benchmark of making schedules: what it measures, and its table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.benchmarks.test_start_time import printed


def test_a_chain_has_the_activation_forward_and_its_gradient_back() -> None:
    from schedule_time import chain

    assert [str(edge) for edge in chain(3)] == [
        "edge 0 (chunk 0 sweep 0 -> chunk 1 sweep 0, per microbatch)",
        "edge 1 (chunk 1 sweep 0 -> chunk 2 sweep 0, per microbatch)",
        "edge 2 (chunk 1 sweep 1 -> chunk 0 sweep 1, per microbatch)",
        "edge 3 (chunk 2 sweep 1 -> chunk 1 sweep 1, per microbatch)",
    ]


def test_all_tasks_of_a_program_are_counted() -> None:
    from schedule_time import PARTS, times_of

    seconds, tasks = times_of("interleaved", 4, 3)
    # 4 stages compute twice per microbatch; 6 edges, each with a send and a receive.
    assert tasks == 3 * (4 * 2 + 6 * 2)
    assert list(seconds) == list(PARTS)
    assert min(seconds.values()) > 0


def test_the_table_has_medians_and_how_they_grow() -> None:
    from schedule_time import PARTS, table_of

    small = dict(zip(PARTS, ([0.3, 0.1, 0.2], [0.5], [1.0], [2.0]), strict=True))
    large = dict(zip(PARTS, ([0.8], [8.0], [1.0], [4.0]), strict=True))
    rows = printed(table_of("zb_h1", 8, {2: small, 8: large}, {2: 100, 8: 1600}))
    assert rows == [
        ["2", "100", "0.20", "0.50", "1.00", "2.00", "3.70", "37000"],
        ["8", "1,600", "0.80", "8.00", "1.00", "4.00", "13.80", "8625"],
        ["grows as", "2.00", "1.00", "2.00", "0.00", "0.50", "0.95", ""],
    ]


def test_the_whole_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import schedule_time

    file = tmp_path / "schedule.json"
    words = ["--schedules=interleaved,zb_v", "--stages=2,4", "--microbatches=4", "--repetitions=2", f"--json={file}"]
    monkeypatch.setattr(sys, "argv", ["schedule_time.py", *words])
    schedule_time.main()
    assert "zb_v, 4 microbatches: seconds" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["tasks"]["interleaved"] == {"2": 4 * (2 * 2 + 2 * 2), "4": 4 * (4 * 2 + 6 * 2)}
    # Of the V, the two chunks in the middle are on one stage, and so nothing goes between them.
    assert found["tasks"]["zb_v"] == {"2": 4 * (4 * 3 + 4 * 2), "4": 4 * (8 * 3 + 12 * 2)}
    assert [len(values) for values in found["seconds"]["zb_v"]["4"].values()] == [2] * 4


@pytest.mark.parametrize("words", [["--schedules", "gpipe"], ["--repetitions", "0"], ["--stages", "4,2"]])
def test_options_that_mean_nothing_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from schedule_time import arguments

    with pytest.raises(SystemExit):
        arguments(words)
    assert "Received" in capsys.readouterr().err
