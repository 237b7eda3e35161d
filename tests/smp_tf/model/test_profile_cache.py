"""Profiles are kept by graph, samples and machine, and read only as they were written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from smp_tf.model.profile_cache import FORMAT, Profile, ProfileCache
from smp_tf.pipeline.planner.unit_peaks import UnitPeaks
from smp_tf.planning.kept_measurements import MeasuredHardware, Subject, this_hardware

HERE = MeasuredHardware("a processor", 2, 1, 0, True, 2, "2.21.0")
NET = Subject("f" * 64, "a" * 64, 4)
PROFILE = Profile(
    FORMAT,
    "net",
    NET,
    HERE,
    {"net/a": (0.25, 0.5), "net/b": (0.0, 1e-9)},
    (1.0, 0.75),
    (1e-5, 2e-10),
    UnitPeaks({"net/a": (3000, 5000), "net/b": (0, 7000)}, 256),
)
TEXT = """{
 "format": 6,
 "model": "net",
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
 "units": {
  "net/a": [
   0.25,
   0.5
  ],
  "net/b": [
   0.0,
   1e-09
  ]
 },
 "alone": [
  1.0,
  0.75
 ],
 "message": [
  1e-05,
  2e-10
 ],
 "peaks": {
  "bytes": {
   "net/a": [
    3000,
    5000
   ],
   "net/b": [
    0,
    7000
   ]
  },
  "counted_from": 256
 }
}""".replace("FINGERPRINT", "f" * 64).replace("FORM", "a" * 64)


def found(cache: ProfileCache, **other: object) -> Profile | None:
    """What there is for the profile's key, or for one that differs in a field."""
    asked = dataclasses.replace(PROFILE, **other)  # type: ignore[arg-type]
    return cache.find(asked.subject, asked.hardware)


def test_a_profile_is_found_as_it_was_kept(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path / "new" / "folder")
    assert found(cache) is None
    path = cache.keep(PROFILE)
    assert path is not None
    assert found(ProfileCache(tmp_path / "new" / "folder")) == PROFILE
    assert PROFILE.times == {"net/a": (0.25, 0.5), "net/b": (0.0, 1e-9)}
    assert path.read_text() == TEXT
    assert PROFILE.shares_alone == (1.0, 0.75)
    assert PROFILE.message_seconds == (1e-5, 2e-10)
    assert dataclasses.replace(PROFILE, message=()).message_seconds is None
    # No unfinished file is left beside it.
    assert list(path.parent.iterdir()) == [path]


def test_another_model_or_machine_has_a_profile_of_its_own(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    cache.keep(PROFILE)
    for field, value in {"fingerprint": "e" * 64, "form": "b" * 64, "samples": 5}.items():
        assert found(cache, subject=dataclasses.replace(NET, **{field: value})) is None, field
    for field, value in {
        "device": "another",
        "cores": 3,
        "threads": 0,
        "ops_at_once": 1,
        "onednn": False,
        "processes": 1,
    }.items():
        assert found(cache, hardware=dataclasses.replace(HERE, **{field: value})) is None, field
    assert found(cache, hardware=dataclasses.replace(HERE, tensorflow="2.20.0")) is None
    assert cache.trouble == ""


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[:-5], "is damaged and not used"),
        (lambda text: "", "is damaged and not used"),
        (lambda text: text.replace('"samples": 4', '"samples": "4"'), "must be a whole number. Received: the text"),
        (lambda text: text.replace("0.25", "-1.0"), "neither of them negative"),
        (lambda text: text.replace("0.25", "NaN"), "neither of them negative"),
        (lambda text: text.replace("0.5", "NaN", 1), "neither of them negative"),
        (lambda text: text.replace("0.25,", ""), "must have two times"),
        (lambda text: text.replace('"format": 6', '"format": 5'), "of another version"),
        (lambda text: text.replace("0.75", "0.0"), "two shares, above 0 and at most 1"),
        (lambda text: text.replace("0.75", "1.5"), "two shares, above 0 and at most 1"),
        (lambda text: text.replace("0.75", "NaN"), "two shares, above 0 and at most 1"),
        (lambda text: text.replace("0.75", "0.75, 0.75"), "two shares, above 0 and at most 1"),
        (lambda text: text.replace('"cores": 2', '"cores": 3'), "of another model or machine"),
        (lambda text: text.replace("1e-05", "-1.0"), "two times, neither negative"),
        (lambda text: text.replace("2e-10", "0.0"), "two times, neither negative"),
        (lambda text: text.replace("2e-10", "2e-10, 1.0"), "two times, neither negative"),
        (lambda text: text.replace("7000", "-7000"), "must be two numbers, and none may be negative"),
        (lambda text: text.replace("7000", "7000, 1"), "must be a list of 2. Received: a list"),
        (lambda text: text.replace("256", "-1"), "must be two numbers, and none may be negative"),
        (lambda text: text.replace("7000", "70.5"), "must be a whole number. Received: the number 70.5"),
        (
            lambda text: text.replace('"net/b"', '"net/c"', 1),
            "Where bytes of units are known, they must be known of all",
        ),
        (lambda text: json.dumps({**json.loads(text), "more": 1}), "Unknown: 'more'"),
    ],
)
def test_a_damaged_profile_is_none_and_that_is_said(tmp_path: Path, damage: object, words: str) -> None:
    cache = ProfileCache(tmp_path)
    path = cache.keep(PROFILE)
    assert path is not None
    path.write_text(damage(path.read_text()))  # type: ignore[operator]
    assert found(cache) is None
    assert words in cache.trouble
    assert str(path) in cache.trouble
    # What is measured anew takes its place.
    cache.keep(PROFILE)
    assert found(cache) == PROFILE
    assert cache.trouble == ""


def test_profiles_of_a_form_are_found_together(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    larger = dataclasses.replace(PROFILE, subject=Subject("e" * 64, NET.form, 8))
    of_another_form = dataclasses.replace(PROFILE, subject=Subject("d" * 64, "a" * 16 + "b" * 48, 16))
    elsewhere = dataclasses.replace(larger, hardware=dataclasses.replace(HERE, cores=3))
    for profile in (PROFILE, larger, of_another_form, elsewhere):
        cache.keep(profile)
    in_order = sorted([PROFILE, larger, elsewhere], key=lambda p: str(cache.path(p.subject, p.hardware)))
    assert cache.of_form(NET.form) == in_order
    assert cache.of_form("c" * 64) == []
    assert cache.trouble == ""
    path = cache.path(larger.subject, HERE)
    assert path is not None
    whole = path.read_text()
    for damage in ("", whole.replace('"cores": 2', '"cores": 4')):
        path.write_text(damage)
        assert cache.of_form(NET.form) == [profile for profile in in_order if profile != larger]
        assert str(path) in cache.trouble


@pytest.mark.parametrize("name", [f"{NET.form[:16]}-{'0' * 32}.json", f"3-{NET.form[:16]}-{'0' * 32}.json"])
def test_profiles_of_another_version_are_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(json.dumps({**dataclasses.asdict(PROFILE), "format": 3}))
    cache = ProfileCache(tmp_path)
    assert cache.of_form(NET.form) == []
    assert found(cache) is None
    assert cache.trouble == ""


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = ProfileCache(tmp_path / "file")
    assert cache.keep(PROFILE) is None
    assert cache.trouble.startswith("The profile cannot be kept in")


def test_the_folder_is_the_users_cache_or_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SMP_TF_PROFILES")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ProfileCache().folder == tmp_path / "smp_tf" / "profiles"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert ProfileCache().folder == Path.home() / ".cache" / "smp_tf" / "profiles"
    monkeypatch.setenv("SMP_TF_PROFILES", str(tmp_path / "elsewhere"))
    assert ProfileCache().folder == tmp_path / "elsewhere"
    monkeypatch.setenv("SMP_TF_PROFILES", "off")
    cache = ProfileCache()
    assert cache.keep(PROFILE) is None
    assert found(cache) is None
    assert cache.of_form(NET.form) == []
    assert cache.trouble == ""


def test_this_machine_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    hardware = this_hardware(3)
    assert hardware.device
    assert hardware.cores >= 1
    assert (hardware.processes, hardware.onednn) == (3, False)
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "1")
    assert this_hardware().onednn
