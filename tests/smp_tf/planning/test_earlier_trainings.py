"""What trainings held is kept by step, machine, settings and placement, and read only as it was written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from smp_tf.config.config import Config
from smp_tf.partition.plan.held_memory import HeldMemory
from smp_tf.planning.earlier_trainings import FORMAT, EarlierTrainings, Setting, TrainingRecord, settings_of
from smp_tf.planning.kept_measurements import MeasuredHardware, Subject

HERE = MeasuredHardware("a processor", 2, 1, 0, True, 2, "2.21.0")
SETTING = Setting(Subject("f" * 64, "a" * 64, 4), HERE, {"partitions": "2", "optimizers": "Adam"})
RECORD = TrainingRecord(FORMAT, "train_step", SETTING, "b" * 64)
KEPT = dataclasses.replace(RECORD, stages=(HeldMemory(700, 200, 30, 680), HeldMemory(900, 0, 0, 10, True)))
TEXT = (
    """{
 "format": 1,
 "step": "train_step",
 "setting": {
  "subject": {
   "fingerprint": "FINGERPRINT",
   "form": "FORM",
   "samples": 4
  },
  "hardware": {
   "device": "a processor",
   "cores": 2,
   "threads": 1,
   "ops_at_once": 0,
   "onednn": true,
   "processes": 2,
   "tensorflow": "2.21.0"
  },
  "settings": {
   "partitions": "2",
   "optimizers": "Adam"
  }
 },
 "placement": "PLACEMENT",
 "stages": [
  {
   "bytes": 700,
   "slots": 200,
   "uncounted": 30,
   "forecast": 680,
   "is_resident": false
  },
  {
   "bytes": 900,
   "slots": 0,
   "uncounted": 0,
   "forecast": 10,
   "is_resident": true
  }
 ]
}""".replace("FINGERPRINT", "f" * 64)
    .replace("FORM", "a" * 64)
    .replace("PLACEMENT", "b" * 64)
)


def test_what_a_training_held_is_found_as_it_was_kept(tmp_path: Path) -> None:
    kept = EarlierTrainings(tmp_path / "new" / "folder")
    assert kept.is_empty
    assert kept.find(SETTING) == {}
    path = kept.keep(KEPT)
    assert path is not None
    assert path.read_text() == TEXT
    assert path.name.startswith("training-1-")
    assert not kept.is_empty
    other = dataclasses.replace(KEPT, placement="c" * 64, stages=KEPT.stages[:1])
    kept.keep(other)
    assert kept.find(SETTING) == {"b" * 64: KEPT.stages, "c" * 64: KEPT.stages[:1]}
    # The last training counts, in one file.
    again = dataclasses.replace(KEPT, stages=KEPT.stages[1:])
    kept.keep(again)
    assert kept.find(SETTING)["b" * 64] == KEPT.stages[1:]
    assert len(list(path.parent.iterdir())) == 2
    assert kept.trouble == ""


def test_another_step_machine_or_setting_finds_nothing(tmp_path: Path) -> None:
    kept = EarlierTrainings(tmp_path)
    kept.keep(KEPT)
    for other in (
        dataclasses.replace(SETTING, subject=Subject("e" * 64, "a" * 64, 4)),
        dataclasses.replace(SETTING, hardware=dataclasses.replace(HERE, onednn=False)),
        dataclasses.replace(SETTING, settings={"partitions": "2", "optimizers": "SGD"}),
    ):
        assert kept.find(other) == {}
    assert kept.trouble == ""


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[:-5], "is damaged and not used"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "of another version, step or machine"),
        (lambda text: text.replace('"samples": 4', '"samples": 5'), "of another version, step or machine"),
        (lambda text: text.replace("700", "-700"), "the bytes of every stage, none of them negative"),
        (lambda text: text.replace("700", '"700"'), "must be a whole number. Received: the text"),
        (lambda text: json.dumps({**json.loads(text), "stages": []}), "the bytes of every stage"),
        (lambda text: json.dumps({**json.loads(text), "more": 1}), "Unknown: 'more'"),
    ],
)
def test_a_damaged_file_is_none_and_that_is_said(tmp_path: Path, damage: object, words: str) -> None:
    kept = EarlierTrainings(tmp_path)
    path = kept.keep(KEPT)
    assert path is not None
    path.write_text(damage(path.read_text()))  # type: ignore[operator]
    assert kept.find(SETTING) == {}
    assert words in kept.trouble
    assert str(path) in kept.trouble
    kept.keep(KEPT)
    assert kept.find(SETTING) == {"b" * 64: KEPT.stages}
    assert kept.trouble == ""


def test_nothing_is_kept_where_the_environment_says_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMP_TF_PROFILES", "off")
    kept = EarlierTrainings()
    assert kept.is_empty
    assert kept.keep(KEPT) is None
    assert kept.find(SETTING) == {}
    assert kept.trouble == ""


def test_nothing_is_kept_for_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SMP_TF_PROFILES")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert EarlierTrainings().is_empty
    assert EarlierTrainings().keep(KEPT) is None


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = EarlierTrainings(tmp_path / "file")
    assert kept.keep(KEPT) is None
    assert kept.trouble.startswith("The memory of this training cannot be kept in")


def test_settings_that_change_what_ranks_hold_are_told_apart() -> None:
    adam, sgd = type("Adam", (), {})(), type("SGD", (), {})()
    plain = settings_of(Config(partitions=2, microbatches=4), 1, [sgd, adam, adam])
    assert plain["optimizers"] == "Adam, SGD"
    others = [
        settings_of(Config(partitions=2, microbatches=4), 2, [sgd, adam]),
        settings_of(Config(partitions=2, microbatches=4), 1, [adam]),
        settings_of(Config(partitions=2, microbatches=2), 1, [sgd, adam]),
        settings_of(Config(partitions=2, microbatches=4, recompute=True), 1, [sgd, adam]),
        settings_of(Config(partitions=2, microbatches=4, pipeline="simple"), 1, [sgd, adam]),
    ]
    assert len({json.dumps(each, sort_keys=True) for each in (plain, *others)}) == 6
    # The seed changes no byte.
    assert settings_of(Config(partitions=2, microbatches=4, seed=5), 1, [sgd, adam]) == plain
