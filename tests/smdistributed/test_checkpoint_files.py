"""Folders from one rank to another: whole, or not at all, and never outside the receiver's folder."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

import smp_tf
from smdistributed.modelparallel.tensorflow import checkpoint_files
from smdistributed.modelparallel.tensorflow.utils import receive_checkpoint_files, send_checkpoint_files
from smp_tf.checkpoint import folder_lock
from smp_tf.errors import CheckpointError, MessageError
from smp_tf.job import runtime


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> SimpleQueue[Any]:
    """What was sent and is still to be received."""
    queue: SimpleQueue[Any] = SimpleQueue()
    monkeypatch.setattr(smp_tf, "send", lambda obj, dest_rank: queue.put(obj))
    monkeypatch.setattr(smp_tf, "recv_from", lambda src_rank: queue.get_nowait())
    return queue


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_arrives_as_it_is(wire: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_files, "_CHUNK", 5)
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "mp_rank_0" / "deep").mkdir(parents=True)
    (source / "mp_rank_0" / "deep" / "ckpt-1.index").write_bytes(b"0123456789ab")
    (source / "empty").write_bytes(b"")
    (source / "ckpt-1.json").write_bytes(b"12345")
    target.mkdir()
    (target / "ckpt-1.json").write_bytes(b"old")
    (target / "other").write_bytes(b"stays")
    send_checkpoint_files(source, 1)
    receive_checkpoint_files(target, 0)
    assert files_in(target) == {**files_in(source), "other": b"stays"}
    assert sorted(path.name for path in target.iterdir()) == ["ckpt-1.json", "empty", "mp_rank_0", "other"]


def test_chunks_are_small(wire: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_files, "_CHUNK", 4)
    (tmp_path / "file").write_bytes(b"0123456789")
    send_checkpoint_files(tmp_path, 1)
    sent = [wire.get_nowait() for _ in range(wire.qsize())]
    digest = hashlib.sha256(b"0123456789").hexdigest()
    assert sent == [{"path": "file", "bytes": 10}, b"0123", b"4567", b"89", {"sha256": digest}, {"files": 1}]


@pytest.mark.parametrize("path", ["/etc/passwd", "../up", "a/../../up", "", ".", None, "a\0b"])
def test_a_path_that_leaves_the_folder_is_refused(wire: Any, tmp_path: Path, path: Any) -> None:
    wire.put({"path": path, "bytes": 1})
    with pytest.raises(MessageError, match=r"must stay within .*Received: " + re.escape(repr(path))):
        receive_checkpoint_files(tmp_path / "target", 0)
    assert list((tmp_path / "target").iterdir()) == []


@pytest.mark.parametrize("path", [".writing-x/a", "a/.replaced-x", ".ckpt.in-use"])
def test_what_is_being_written_neither_comes_nor_goes(wire: Any, tmp_path: Path, path: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).touch()
    send_checkpoint_files(tmp_path, 1)
    assert wire.get_nowait() == {"files": 0}
    wire.put({"path": path, "bytes": 1})
    with pytest.raises(MessageError, match=r"must be that of a file's own name. Received: " + re.escape(repr(path))):
        receive_checkpoint_files(tmp_path / "target", 0)


@pytest.mark.parametrize("path", ["link", "link/file"])
def test_a_path_through_a_link_is_refused(wire: Any, tmp_path: Path, path: str) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "link").symlink_to(tmp_path / "outside")
    wire.put({"path": path, "bytes": 1})
    with pytest.raises(MessageError, match=r"leads through .*link.*, a symbolic link"):
        receive_checkpoint_files(tmp_path / "target", 0)
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_link_is_not_sent(wire: Any, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(MessageError, match="is neither, or a symbolic link"):
        send_checkpoint_files(tmp_path, 1)
    assert wire.empty()


def test_a_damaged_file_changes_nothing(wire: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"good")
    for message in ({"path": "file", "bytes": 3}, b"bad", {"sha256": "0"}, {"files": 1}):
        wire.put(message)
    with pytest.raises(MessageError, match="'file' from rank 0 arrived damaged"):
        receive_checkpoint_files(tmp_path, 0)
    assert files_in(tmp_path) == {"file": b"good"}


@pytest.mark.parametrize("call", ["replace", "fsync"])
@pytest.mark.parametrize("number", range(1, 7))
@pytest.mark.parametrize("can_link", [True, False])
def test_an_error_while_renaming_changes_nothing(
    call: str, number: int, can_link: bool, wire: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for folder, names in ((source, ["ckpt-1.json", "ckpt-2.json", "mp_rank_0/a"]), (target, ["ckpt-1.json", "notes"])):
        (folder / "mp_rank_0").mkdir(parents=True)
        for name in names:
            (folder / name).write_text(f"{folder.name} {name}")
    before = files_in(target)
    send_checkpoint_files(source, 1)
    original, calls = getattr(os, call), iter(range(1, 100))

    def failing(*args: Any, **kwargs: Any) -> None:
        if next(calls) == number:
            raise OSError(28, "No space left on device")
        original(*args, **kwargs)

    def no_links(*args: Any) -> None:
        raise OSError(1, "Operation not permitted")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing)
        if not can_link:
            patched.setattr(os, "link", no_links)
        try:
            receive_checkpoint_files(target, 0)
        except OSError:
            assert files_in(target) == before
        else:
            assert files_in(target) == {**files_in(source), "notes": b"target notes"}
    assert sorted(path.name for path in target.iterdir() if path.name.startswith(".")) == []


@pytest.mark.parametrize("can_link", [True, False])
def test_what_cannot_be_put_back_is_kept_and_told(
    can_link: bool, wire: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for folder, names in ((source, ["ckpt-1.json", "ckpt-2.json", "a", "new"]), (target, ["ckpt-1.json", "a"])):
        folder.mkdir()
        for name in names:
            (folder / name).write_text(f"{folder.name} {name}")
    before = files_in(target)
    send_checkpoint_files(source, 1)
    replace, calls = os.replace, []

    def failing(first: Path, second: Path) -> None:
        calls.append(second.name)
        # The last manifest cannot take its place, and of what has taken it, one cannot be put back.
        if len(calls) == 4 or (second.name == "a" and calls.count("a") == 2):
            raise OSError(28, "No space left on device")
        replace(first, second)

    monkeypatch.setattr(os, "replace", failing)
    if not can_link:
        monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(OSError, match="No space left"):
        receive_checkpoint_files(target, 0)
    [kept] = target.glob(".replaced-*")
    found = files_in(target)
    assert found.pop(f"{kept.name}/a") == before["a"]
    # A file that can have a second name has it still.
    assert {name: text for name, text in found.items() if kept.name not in name} == {**before, "a": b"source a"}
    assert not list(target.glob(".writing-*"))
    assert capsys.readouterr().err == (
        f"smp_tf: the files that were received could not take their places in {target} ([Errno 28] No space left on "
        f"device), and these could not be put back as they were: a (No space left on device). What was there before is "
        f"whole, in {kept}: put it back by hand. What has nothing there is new: delete it.\n"
    )


def no_links(*args: Any) -> None:
    raise OSError(1, "Operation not permitted")


def test_a_file_in_the_place_of_a_folder_is_refused(wire: Any, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    for name in ("a", "b"):
        (tmp_path / "source" / name).write_text("new")
    (tmp_path / "target" / "b").mkdir(parents=True)
    (tmp_path / "target" / "b" / "file").write_text("stays")
    send_checkpoint_files(tmp_path / "source", 1)
    with pytest.raises(MessageError, match=r"A file 'b' was received, and '.*/target/b' is a folder."):
        receive_checkpoint_files(tmp_path / "target", 0)
    assert files_in(tmp_path / "target") == {"b/file": b"stays"}


@pytest.mark.parametrize("is_ours", [False, True])
def test_a_folder_that_another_job_uses_is_left_alone(
    is_ours: bool, wire: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "ckpt-1.json").write_text("{}")
    (tmp_path / "target").mkdir()
    folder_lock.take(str(tmp_path / "target"), "ckpt")
    # As it is on another rank, or in another job.
    held = dict(folder_lock._held)
    folder_lock._held.clear()
    if is_ours:
        topology = SimpleNamespace(hosts=("other", socket.gethostname()), pids=(1, os.getpid()))
        monkeypatch.setattr(runtime, "current_or_none", lambda: SimpleNamespace(topology=topology))
    send_checkpoint_files(tmp_path / "source", 1)
    if is_ours:
        receive_checkpoint_files(tmp_path / "target", 0)
    else:
        with pytest.raises(CheckpointError, match=rf"is in use: the job of host .* \(process {os.getpid()}, since"):
            receive_checkpoint_files(tmp_path / "target", 0)
    folder_lock._held.update(held)
    folder_lock.give_up(str(tmp_path / "target"), "ckpt")
    assert files_in(tmp_path / "target") == ({"ckpt-1.json": b"{}"} if is_ours else {})


@pytest.mark.parametrize("message", ["hello", {"epoch": 3}])
def test_another_message_is_told_from_a_file(wire: Any, tmp_path: Path, message: Any) -> None:
    wire.put(message)
    with pytest.raises(MessageError, match="Rank 0 must call send_checkpoint_files at the same point"):
        receive_checkpoint_files(tmp_path, 0)


def test_what_is_no_folder_is_refused(wire: Any, tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError, match="which is not a folder"):
        send_checkpoint_files(tmp_path / "nothing", 1)
