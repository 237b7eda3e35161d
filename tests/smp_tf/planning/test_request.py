"""What a request for a plan takes of what was measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from smp_tf.job import runtime
from smp_tf.planning import request


def model(name: str, samples: int, beyond: dict[str, tuple[int, int]]) -> Any:
    """A model whose layers were measured, or not."""
    return SimpleNamespace(_smp_store=SimpleNamespace(model_name=name, beyond_samples=samples, beyond=beyond))


def test_memory_counts_that_was_measured_with_as_many_samples_and_other_memory_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runtime, "current", lambda: SimpleNamespace(topology=SimpleNamespace(rank=0)))
    models = [model("one", 4, {"one/a": (1, 2)}), model("two", 8, {"two/a": (3, 4)}), model("three", 0, {})]
    assert request._beyond_of(models, 4, decides=True) == {"one/a": (1, 2)}
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("The memory of model 'two' was measured for 8 samples, and its microbatches have 4") == 1
    assert "'one'" not in said
    assert "'three'" not in said
    # A step that follows an earlier one, such as an evaluation, decides nothing.
    assert request._beyond_of(models, 8, decides=False) == {"two/a": (3, 4)}
    assert capsys.readouterr().err == ""
