"""A SavedModel replaces an earlier one and nothing else, whenever its process is killed."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smp_tf.errors import StepError
from smp_tf.files import durable_files, mounts
from smp_tf.model import saved_model_folder

OWN = ("saved_model.pb", "keras_metadata.pb", "fingerprint.pb", "variables/variables.index", "assets/words")
OTHERS = {"checkpoints/ckpt-1.json": "a checkpoint", ".ckpt.in-use": "me", "assets/logo": "a picture", "log": "text"}
#: What a save calls to change what is on disk.
CALLS = ("mkdir", "fsync", "link", "rename", "unlink", "rmdir")


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def model(text: str) -> dict[str, str]:
    return {**dict.fromkeys(OWN, text), f"variables/variables.data-{text}": text}


def content(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def save(place: Path, text: str = "new") -> None:
    saved_model_folder.require_folder_place(str(place))
    with saved_model_folder.building(str(place)) as built:
        write(Path(built), model(text))
        saved_model_folder.put_in_place(built, str(place))


@pytest.fixture(params=["exchanged", "renamed"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "renamed":
        monkeypatch.setattr(durable_files, "_exchange", lambda first, second: False)


@pytest.mark.parametrize("earlier", [{}, model("old")], ids=["no model", "a model"])
def test_what_else_is_in_the_folder_stays(earlier: dict[str, str], tmp_path: Path) -> None:
    place = tmp_path / "run"
    write(place, {**OTHERS, **earlier})
    before = (place.stat().st_ino, (place / "checkpoints").stat().st_ino)
    save(place)
    assert content(tmp_path) == {f"run/{name}": text for name, text in {**OTHERS, **model("new")}.items()}
    # Whoever works in it, or has it open, still does.
    assert (place.stat().st_ino, (place / "checkpoints").stat().st_ino) == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_working_folder_is_written_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, model("old"))
    monkeypatch.chdir(tmp_path)
    save(Path("."))
    assert sorted(os.listdir(".")) == sorted({name.partition("/")[0] for name in OWN})
    assert content(Path(".")) == model("new")


def test_what_a_link_leads_to_is_written_into(tmp_path: Path) -> None:
    write(tmp_path / "disk", {"log": "text"})
    (tmp_path / "run").symlink_to("disk")
    save(tmp_path / "run")
    assert (tmp_path / "run").is_symlink()
    assert content(tmp_path / "disk") == {"log": "text", **model("new")}


@pytest.mark.parametrize("listed", [True, False], ids=["a folder of the same disk", "another disk"])
def test_a_mount_point_is_written_into(listed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "a model"
    write(place, model("old"))
    if listed:
        (tmp_path / "mounts").write_text(
            f"36 35 98:0 / {str(place).replace(' ', chr(92) + '040')} rw - ext4 /dev/x rw\n"
        )
        monkeypatch.setattr(mounts, "_TABLE", str(tmp_path / "mounts"))
    else:
        monkeypatch.setattr(os.path, "ismount", lambda path: path == str(place))

    def busy(*args: Any) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(durable_files, "_replace_folder", busy)
    save(place)
    assert content(place) == model("new")


@pytest.mark.usefixtures("_way")
def test_what_is_put_into_a_folder_while_it_is_replaced_is_brought_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "model"
    write(place, model("old"))
    sync_tree = durable_files.sync_tree

    def meanwhile(path: str) -> None:
        sync_tree(path)
        write(place, {"checkpoints/a": "of another rank"})

    monkeypatch.setattr(durable_files, "sync_tree", meanwhile)
    save(place)
    assert content(tmp_path) == {
        f"model/{name}": text for name, text in {**model("new"), "checkpoints/a": "of another rank"}.items()
    }


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"model": ""}, r"A SavedModel is a folder, and '.*/model' is none\. Remove it, or give another path\."),
        ({"model/variables": ""}, r"'.*/model/variables' must be a SavedModel's folder of this name, and is something"),
        ({"model/saved_model.pb/a": ""}, r"'.*/saved_model.pb' must be a SavedModel's file of this name, and is some"),
    ],
)
def test_what_cannot_be_replaced_is_refused(files: dict[str, str], words: str, tmp_path: Path) -> None:
    write(tmp_path, files)
    with pytest.raises(StepError, match=words):
        saved_model_folder.require_folder_place(str(tmp_path / "model"))


def test_a_file_takes_the_place_of_no_folder_and_no_mount_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"m.h5/log": "text", "n.h5": "text"})
    saved_model_folder.require_file_place(str(tmp_path / "n.h5"))
    with pytest.raises(StepError, match=r"A file takes the place of no folder, and '.*/m.h5' is one\."):
        saved_model_folder.require_file_place(str(tmp_path / "m.h5"))
    with durable_files.building(tmp_path / "m.h5") as built:
        Path(built).touch()
        with pytest.raises(IsADirectoryError):
            durable_files.put_in_place(built, tmp_path / "m.h5")
    monkeypatch.setattr(os.path, "ismount", lambda path: path.endswith("n.h5"))
    with pytest.raises(StepError, match=r"'.*/n.h5' is a mount point, which no other file can replace\."):
        saved_model_folder.require_file_place(str(tmp_path / "n.h5"))
    assert content(tmp_path) == {"m.h5/log": "text", "n.h5": "text"}


def counted(end: Callable[[], Any], number: int, patched: pytest.MonkeyPatch) -> None:
    """Ends at the n-th call that changes what is on disk."""
    calls = iter(range(1, 10000))

    def patch(name: str) -> None:
        original = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == number:
                end()
            # What is on disk after a loss of power cannot be seen here, and waiting for it takes long.
            return None if name == "fsync" else original(*args, **kwargs)

        patched.setattr(os, name, call)

    for name in CALLS:
        patch(name)


@pytest.mark.parametrize(
    "others", [pytest.param(OTHERS, id="others"), pytest.param({}, id="alone", marks=pytest.mark.full)]
)
def test_killed_at_any_call_nothing_is_lost_and_no_model_is_half_of_another(
    others: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = []
    for number in range(1, 200):
        place = tmp_path / str(number) / "run"
        write(place, {**others, **model("old")})
        child = os.fork()
        if not child:
            counted(lambda: os.kill(os.getpid(), signal.SIGKILL), number, monkeypatch)
            save(place)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found = content(place)
        assert all(found.get(name) == text for name, text in others.items() if "assets" not in name)
        state = found.get("saved_model.pb", "none")
        if state == "none":
            assert others
            [kept] = place.glob(".replaced-*")
            both = {**found, **content(kept)}
            assert {name: both[name] for name in {**model("old"), **others}} == {**model("old"), **others}
        else:
            assert {name: found[name] for name in {**model(state), **others}} == {**model(state), **others}
        states.append(state)
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert (states[0], states[-1]) == ("old", "new")
    assert states == sorted(states, key=["old", "none", "new"].index)
    assert ("none" in states) == bool(others)
    assert [path.name for path in place.parent.iterdir()] == ["run"]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_error_leaves_all_as_it_was(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise error

    place = tmp_path / "run"
    states = []
    for number in range(1, 60):
        write(place, {**OTHERS, **model("old")})
        (place / "variables" / "variables.data-new").unlink(missing_ok=True)
        with monkeypatch.context() as patched:
            counted(fail, number, patched)
            with contextlib.suppress(OSError, KeyboardInterrupt):
                save(place)
        found = {name: text for name, text in content(place).items() if not durable_files.is_temporary(name)}
        states.append(found["saved_model.pb"])
        assert found == {**OTHERS, **model(states[-1])}
    assert set(states) == {"old", "new"}


def test_what_cannot_be_put_back_is_kept_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, {**OTHERS, **model("old")})
    rename = os.rename

    def failing(source: str, target: str) -> None:
        if source.endswith("variables") and ".replaced-" not in target:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="Input/output error"):
        save(tmp_path)
    [kept] = tmp_path.glob(".replaced-*")
    assert capsys.readouterr().err == (
        f"smp_tf: the model in {tmp_path} could not be replaced ([Errno 5] Input/output error), nor put back. What is "
        f"in {kept} belongs to it: move that to {tmp_path} by hand.\n"
    )
    both = {**content(tmp_path), **content(kept)}
    assert not (tmp_path / "saved_model.pb").exists()
    assert {name: both[name] for name in model("old")} == model("old")
