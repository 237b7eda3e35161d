"""Files and folders are there whole or not at all: of errors, links, and a system that cannot exchange two names."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smp_tf.files import durable_files


def content(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def build(path: Path, text: str) -> None:
    """A folder with a file in it, put in place."""
    with durable_files.building(path) as built:
        os.makedirs(os.path.join(built, "deep"))
        Path(built, "deep", "file").write_text(text)
        durable_files.put_in_place(built, path)


def fail(*args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def failing_at(original: Callable[..., Any], number: int, error: BaseException) -> Callable[..., Any]:
    """A function that fails at its n-th call, and at no other."""
    calls = iter(range(1, 1000))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            raise error
        return original(*args, **kwargs)

    return call


class TestFile:
    @pytest.mark.parametrize("text", ["new ä", b"new"])
    def test_is_written_with_its_folders(self, text: str | bytes, tmp_path: Path) -> None:
        path = tmp_path / "a" / "b" / "file"
        for _ in range(2):
            durable_files.write_file(path, text)
        assert path.read_bytes() == (text.encode() if isinstance(text, str) else text)
        assert list(path.parent.iterdir()) == [path]

    def test_has_the_rights_that_files_have(self, tmp_path: Path) -> None:
        durable_files.write_file(tmp_path / "file", "")
        (tmp_path / "other").touch()
        assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == stat.S_IMODE((tmp_path / "other").stat().st_mode)

    @pytest.mark.parametrize("call", ["fsync", "replace"])
    def test_that_cannot_be_written_leaves_the_earlier_one(
        self, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "file"
        path.write_text("old")
        monkeypatch.setattr(os, call, fail)
        with pytest.raises(OSError, match="Input/output"):
            durable_files.write_file(path, "new")
        assert content(tmp_path) == {"file": "old"}

    def test_writes_through_no_link(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "outside").write_text("stays")
        (tmp_path / "file").symlink_to("outside")
        durable_files.write_file(tmp_path / "file", "new")
        assert content(tmp_path) == {"outside": "stays", "file": "new"}
        # Not even where somebody has guessed the name.
        monkeypatch.setattr(durable_files.secrets, "token_hex", lambda size: "0" * (2 * size))
        (tmp_path / f".writing-{'0' * 16}-file").symlink_to("outside")
        with pytest.raises(FileExistsError):
            durable_files.write_file(tmp_path / "file", "newer")
        assert (tmp_path / "outside").read_text() == "stays"

    def test_is_synced_before_it_is_renamed_and_its_folders_after(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done: list[str] = []
        fsync, replace = os.fsync, os.replace

        def noted_sync(descriptor: int) -> None:
            done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name.partition('-')[0]}")
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", noted_sync)
        monkeypatch.setattr(os, "replace", lambda *paths: (done.append("rename"), replace(*paths)))
        durable_files.write_file(tmp_path / "a" / "b" / "file", "text")
        assert done == [f"sync {tmp_path.name.partition('-')[0]}", "sync a", "sync .writing", "rename", "sync b"]


class TestFolder:
    @pytest.fixture(params=["exchanged", "renamed"], autouse=True)
    def move(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str]:
        """The call by which a folder takes its place."""
        if request.param == "exchanged":
            return durable_files, "_exchange"
        monkeypatch.setattr(durable_files, "_exchange", lambda first, second: False)
        return os, "rename"

    def test_takes_the_place_of_another(self, tmp_path: Path) -> None:
        for text in ("old", "new"):
            build(tmp_path / "model", text)
            assert content(tmp_path) == {"model/deep/file": text}

    def test_takes_the_place_of_a_link_and_not_of_what_it_leads_to(self, tmp_path: Path) -> None:
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "file").write_text("stays")
        (tmp_path / "model").symlink_to("other")
        build(tmp_path / "model", "new")
        assert content(tmp_path) == {"other/file": "stays", "model/deep/file": "new"}
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "other"]

    @pytest.mark.parametrize(("call", "number"), [("move", 1), ("move", 2), *(("fsync", n) for n in range(1, 6))])
    @pytest.mark.parametrize("error", [OSError(errno.EIO, "full"), KeyboardInterrupt()], ids=["error", "interrupt"])
    def test_an_error_leaves_the_earlier_one(
        self,
        call: str,
        number: int,
        error: BaseException,
        move: tuple[Any, str],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        build(tmp_path / "model", "old")
        module, name = move if call == "move" else (os, "fsync")
        # One exchange, or two renames; three folders and a file that are synced.
        if number > (4 if call == "fsync" else 1 if module is durable_files else 2):
            expected: Any = contextlib.nullcontext()
        else:
            expected = pytest.raises(type(error))
        with monkeypatch.context() as patched:
            patched.setattr(module, name, failing_at(getattr(module, name), number, error))
            with expected as raised:
                build(tmp_path / "model", "new")
        assert content(tmp_path) == {"model/deep/file": "new" if raised is None else "old"}
        assert [path.name for path in tmp_path.iterdir()] == ["model"]

    def test_one_that_somebody_makes_meanwhile_costs_neither(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(durable_files, "_exchange", lambda first, second: False)
        build(tmp_path / "model", "old")
        rename, calls = os.rename, []

        def renamed(source: str, target: str) -> None:
            rename(source, target)
            if not calls:
                (tmp_path / "model").mkdir()
                (tmp_path / "model" / "file").write_text("of another job")
            calls.append(target)

        monkeypatch.setattr(os, "rename", renamed)
        with pytest.raises(OSError, match="not empty"):
            build(tmp_path / "model", "new")
        [old] = tmp_path.glob(".replaced-*-model")
        assert content(tmp_path) == {"model/file": "of another job", f"{old.name}/deep/file": "old"}
        assert f"What was there before is whole, in {old}." in capsys.readouterr().err


def test_what_cannot_be_deleted_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(durable_files.shutil, "rmtree", fail)
    build(tmp_path / "model", "new")
    [left] = tmp_path.glob(".writing-*")
    assert capsys.readouterr().err == (
        f"smp_tf: {left} is no longer needed and could not be deleted: Input/output error. Delete it by hand.\n"
    )


def test_a_file_system_that_syncs_no_folders_is_none_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    build(tmp_path / "model", "new")
    durable_files.write_file(tmp_path / "file", "text")
    assert content(tmp_path) == {"model/deep/file": "new", "file": "text"}


#: Files that do it themselves: this one; what renames several files as one;
#: what replaces one thing in a folder of others; Keras's file within an archive that is being built; logs, which grow.
_OTHERS = {
    "smp_tf/launch/log_folder.py",
    "smp_tf/files/durable_files.py",
    "smp_tf/model/tf_checkpoint.py",
    "smdistributed/modelparallel/tensorflow/checkpoint_files.py",
    "smp_tf/keras/archives.py",
    "smp_tf/model/saved_model_folder.py",
}
_WRITES = re.compile(
    r"os\.(replace|rename|link|fsync)\(|\.write_(text|bytes)\(|Temporary|mkstemp|mkdtemp|open\([^)]*\"[wxa]b?\""
)


def test_no_other_file_writes_files_whole() -> None:
    root = Path(__file__).parents[3]
    sources = [
        path for room in ("smp_tf", "smdistributed", "partition", "pipeline") for path in root.glob(f"{room}/**/*.py")
    ]
    assert len(sources) > 200
    found = {path.relative_to(root).as_posix() for path in sources if _WRITES.search(path.read_text(encoding="utf-8"))}
    assert found == _OTHERS
