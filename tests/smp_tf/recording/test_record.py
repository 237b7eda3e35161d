"""`smp.timeline` in one process: what is recorded, what is not, and what is said of wrong arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.errors import NotInitializedError, TimelineError
from smp_tf.ops import recorder
from smp_tf.pipeline.measure.recorded import RankRecord
from smp_tf.recording import record as recording
from smp_tf.recording import timeline_file

X = np.arange(24, dtype=np.float32).reshape(8, 3) / 10.0


@pytest.fixture(autouse=True)
def _not_recording() -> Iterator[None]:
    recorder.stop()
    yield
    recorder.stop()


def trainer(*, jit_compile: bool = False, graph: bool = True) -> Callable[[], Any]:
    """A training step, whose gradients are applied in a graph of their own."""
    hidden = [layers.Dense(4, activation="tanh"), layers.Dense(2)]
    model = smp.DistributedModel(tf_keras.Sequential([tf_keras.Input((3,)), *hidden]))
    optimizer = tf_keras.optimizers.Adam(jit_compile=False)

    @smp.step
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    def apply(gradients: Any) -> None:
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    # Builds the slots.
    apply([g.accumulate() for g in step(X)])
    if graph:
        apply = tf.function(apply, jit_compile=jit_compile)
    return lambda: apply([g.accumulate() for g in step(X)])


def read(folder: Path) -> RankRecord:
    [record] = timeline_file.read([folder])
    return record


def names(record: RankRecord) -> list[list[str]]:
    return [[str(run.task) for run in step.tasks] for step in record.steps]


@pytest.mark.parametrize("graph", [True, False])
def test_a_split_step_is_recorded(init: Callable[..., None], tmp_path: Path, graph: bool) -> None:
    init(microbatches=2)
    train = trainer(graph=graph)
    with smp.timeline(tmp_path / "new" / "folder", steps=(1, 2)):
        for _ in range(5):
            train()
    record = read(tmp_path / "new" / "folder")
    assert (record.rank, record.stage, record.ranks, record.dropped) == (0, 0, (0,), 0)
    assert names(record) == [["0F0", "0B0", "0F1", "0B1", "0APPLY"]] * 2
    # One step before the recording, and one within it.
    assert [step.step for step in record.steps] == [2, 3]
    [program] = record.programs.values()
    assert (program.name, program.schedule) == ("step", "interleaved")
    assert program.planned.text() == "0F0 0B0 0F1 0B1 0APPLY"
    first, second = record.steps
    assert first.begin < first.end < first.tasks[-1].begin < first.tasks[-1].end < first.until == second.begin


def test_all_steps_unless_some_are_named(init: Callable[..., None], tmp_path: Path) -> None:
    init(microbatches=2)
    train = trainer()
    with smp.timeline(tmp_path):
        train()
        train()
    assert len(read(tmp_path).steps) == 2


def test_a_step_that_is_not_split_has_no_marks(init: Callable[..., None], tmp_path: Path) -> None:
    init(microbatches=1)
    train = trainer()
    with smp.timeline(tmp_path):
        train()
    assert read(tmp_path).steps == ()


def test_what_xla_compiles_has_no_marks(init: Callable[..., None], tmp_path: Path) -> None:
    init(microbatches=2)
    train = trainer(jit_compile=True)
    with smp.timeline(tmp_path):
        train()
    assert names(read(tmp_path)) == [["0F0", "0B0", "0F1", "0B1"]]


def test_an_error_within_ends_the_recording(init: Callable[..., None], tmp_path: Path) -> None:
    init(microbatches=2)
    with pytest.raises(KeyError), smp.timeline(tmp_path / "none"):
        raise KeyError("something else")
    assert not (tmp_path / "none").exists()
    assert recorder.start()


def test_one_at_a_time(init: Callable[..., None], tmp_path: Path) -> None:
    init(microbatches=2)
    with (
        smp.timeline(tmp_path),
        pytest.raises(TimelineError, match="One timeline is recorded at a time"),
        smp.timeline(tmp_path),
    ):
        pass


@pytest.mark.parametrize("steps", [(3,), (3, 2), (-1, 2), (1.0, 2), (True, 2), "12", 7])
def test_steps_that_are_no_pair(init: Callable[..., None], steps: Any) -> None:
    init(microbatches=2)
    with pytest.raises(TimelineError, match=r"steps is a pair \(first, last\)"):
        smp.callbacks.Timeline(steps=steps)
    with pytest.raises(TimelineError, match="Received: "), smp.timeline("nowhere", steps=steps):
        pass


def test_without_init() -> None:
    smp.shutdown()
    with pytest.raises(NotInitializedError), smp.timeline("nowhere"):
        pass


def test_shutdown_ends_a_recording(init: Callable[..., None]) -> None:
    init(microbatches=2)
    trainer()
    recording.start()
    smp.shutdown()
    assert recorder.start()


def test_points_that_are_missing_are_told(
    init: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    init(microbatches=2)
    train = trainer()
    stop = recorder.stop
    monkeypatch.setattr(recording.recorder, "stop", lambda: (stop()[0], 12))
    with smp.timeline(tmp_path):
        train()
    assert read(tmp_path).dropped == 12
    assert "the last 12 are missing from the timeline. Record fewer steps at a time." in capsys.readouterr().err


class Clock:
    """Moves by what happens."""

    def __init__(self) -> None:
        self.now = 1000

    def __call__(self) -> int:
        return self.now


def asked(clock: Clock, ahead: int, trips: list[tuple[int, int] | None]) -> Callable[[], int | None]:
    """A rank whose clock is ahead, and which a question reaches, and whose answer comes back, after so long."""
    left = iter(trips * recording._QUESTIONS)

    def ask() -> int | None:
        trip = next(left)
        if trip is None:
            clock.now += 10**9
            return None
        clock.now += trip[0]
        told = clock.now + ahead
        clock.now += trip[1]
        return told

    return ask


def test_the_answer_that_comes_soonest_tells_the_difference_of_two_clocks() -> None:
    clock = Clock()
    assert recording._offset(asked(clock, 7_000_000, [(900, 100), (20, 20), None]), clock) == 7_000_000
    assert recording._offset(asked(clock, -500, [(30, 70)]), clock) == -520
    # Within what the question took, it is no difference.
    assert recording._offset(asked(clock, 0, [(30, 70)]), clock) == 0
    assert recording._offset(asked(clock, 15, [(50, 50)]), clock) == 0
    assert recording._offset(asked(clock, 7, [None]), clock) == 0
