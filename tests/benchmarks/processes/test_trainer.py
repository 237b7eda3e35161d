"""What a process of the benchmarks measures of itself."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest


def test_a_named_function_within_another_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from processes import trainer

    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def passing(seconds: float) -> str:
        clock[0] += seconds
        return f"{seconds:.0f} s"

    module = SimpleNamespace(inner=lambda: passing(2.0), other=SimpleNamespace(alone=lambda: passing(4.0)))
    module.outer = lambda: (module.inner(), passing(1.0))
    stopwatch = trainer.Stopwatch(module, {"trace": ("outer",), "plan": ("inner", "other.alone")})
    module.outer()
    module.other.alone()
    assert stopwatch.seconds == {"trace": 3.0, "plan": 4.0}
    module.inner()
    assert stopwatch.seconds == {"trace": 3.0, "plan": 6.0}
    assert stopwatch.returned == {"outer": ("2 s", "1 s"), "inner": "2 s", "other.alone": "4 s"}


def test_what_raises_is_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from processes import trainer

    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def fails() -> None:
        clock[0] += 1.0
        raise KeyError

    module = SimpleNamespace(fails=fails)
    stopwatch = trainer.Stopwatch(module, {"trace": ("fails",)})
    for _ in range(2):
        with pytest.raises(KeyError):
            module.fails()
    assert stopwatch.seconds == {"trace": 2.0}
