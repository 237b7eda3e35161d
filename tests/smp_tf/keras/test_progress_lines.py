"""Keras's progress in a file: lines without control characters, few of them, and Keras's own words."""

from __future__ import annotations

import io
import sys

import pytest
import tf_keras

from smp_tf.keras import loops
from smp_tf.keras.progress_lines import ProgressLines

pytestmark = pytest.mark.usefixtures("keras_defaults")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(logger: tf_keras.callbacks.ProgbarLogger, steps: int | None, capsys: pytest.CaptureFixture[str]) -> str:
    """What a callback prints of two epochs of three batches."""
    logger.set_params({"verbose": 1, "epochs": 2, "steps": steps})
    logger.on_train_begin()
    for epoch in range(2):
        logger.on_epoch_begin(epoch)
        for batch in range(3):
            logger.on_train_batch_end(batch, {"loss": 3.0 - batch})
        logger.on_epoch_end(epoch, {"loss": 2.0})
    return capsys.readouterr().out


def words(line: str) -> str:
    """A line without times."""
    return " - ".join(part for part in line.split(" - ") if "ETA" not in part and "/step" not in part)


def test_an_epoch_has_one_line_and_more_only_after_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    last = "3/3 [==============================] - loss: 2.0000"
    lines = printed(ProgressLines(), 3, capsys).splitlines()
    assert [words(line) for line in lines] == ["Epoch 1/2", last, "Epoch 2/2", last]
    lines = printed(ProgressLines(interval=0.0), 3, capsys).splitlines()
    assert [words(line) for line in lines[:5]] == [
        "Epoch 1/2",
        "1/3 [=========>....................] - loss: 3.0000",
        "2/3 [===================>..........] - loss: 2.5000",
        "3/3 [==============================] - loss: 2.0000",
        last,
    ]


@pytest.mark.parametrize("steps", [3, None])
def test_no_control_characters_are_printed_and_keras_prints_some(
    steps: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    own = printed(tf_keras.callbacks.ProgbarLogger(count_mode="steps"), steps, capsys)
    assert "\b" in own
    assert "\r" in own
    ours = printed(ProgressLines(interval=0.0), steps, capsys)
    assert not set(ours) & set("\b\r\x1b")


def test_lines_are_for_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYCHARM_HOSTED", raising=False)
    [lines] = loops.progress_in_lines([])
    assert isinstance(lines, ProgressLines)
    assert loops.progress_in_lines([lines]) == []
    assert loops.progress_in_lines([tf_keras.callbacks.ProgbarLogger()]) == []
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert loops.progress_in_lines([]) == []
