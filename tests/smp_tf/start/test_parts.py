"""The parts of a job start in their order and stop backwards."""

from __future__ import annotations

import pytest

from smp_tf.config.config import Config
from smp_tf.start import parts
from smp_tf.start.job import Job
from smp_tf.start.parts import JobPart
from smp_tf.start.start_watch import StartWatch


def test_parts_start_in_order_and_stop_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    made = (
        JobPart("first", lambda job: done.append("first on"), lambda job: done.append("first off")),
        JobPart("second", lambda job: done.append("second on")),
        JobPart(
            "third", lambda job: done.append("third on"), lambda job: done.append("third off"), is_left_at_exit=True
        ),
    )
    monkeypatch.setattr(parts, "PARTS", made)
    job = Job(Config(), StartWatch(1.0), lambda: None)
    parts.start(job)
    parts.stop(job)
    assert done == ["first on", "second on", "third on", "third off", "first off"]
    del done[:]
    parts.stop(job, at_exit=True)
    assert done == ["first off"]


def test_the_transport_is_left_after_all_that_uses_it() -> None:
    names = [part.what for part in parts.PARTS]
    for what in ("failure hooks", "watch over steps", "process sets"):
        assert names.index("transport") < names.index(what)
    assert [part.what for part in parts.PARTS if part.is_left_at_exit] == ["process sets"]
