"""What benchmarks were measured on stands beside their figures."""

from __future__ import annotations

import argparse
import json

import pytest

from tests.benchmarks.conftest import BENCHMARKS

WRITING = sorted(path.name for path in BENCHMARKS.glob("*.py") if '"--json"' in path.read_text(encoding="utf-8"))


def test_the_machine_is_named_with_what_makes_it_fast_or_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "posix")
    monkeypatch.setenv("HOME_OF_NOBODY", "x")
    from harness.machine import machine

    told = machine()
    assert told["cores"] >= 1
    assert told["memory_bytes"] > 2**28
    assert told["packages"].keys() >= {"tf-keras", "horovod", "numpy"}
    assert told["environment"]["UCX_TLS"] == "posix"
    assert "HOME_OF_NOBODY" not in told["environment"]


def test_what_a_benchmark_was_given_stands_beside_the_machine() -> None:
    from harness.machine import circumstances

    told = circumstances(argparse.Namespace(repetitions=3, json=BENCHMARKS / "out"))
    assert told.keys() == {"command", "machine", "settings"}
    # All of it can be written.
    assert json.loads(json.dumps(told))["settings"] == {"repetitions": 3}


@pytest.mark.parametrize("name", WRITING)
def test_what_is_written_says_on_which_machine(name: str) -> None:
    """Four of them wrote the figures alone."""
    assert "circumstances(" in (BENCHMARKS / name).read_text(encoding="utf-8")
