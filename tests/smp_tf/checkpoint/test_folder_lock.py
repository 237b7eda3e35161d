"""A folder is written to by one job at a time: the other one is named, nobody waits, and the dead hold nothing."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smp_tf import announce as announcing
from smp_tf.checkpoint import folder_lock
from smp_tf.errors import CheckpointError


@pytest.fixture(autouse=True)
def _released(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(folder_lock, "_PATIENCE", 0.0)
    yield
    folder_lock._release_all()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(announcing, "_said", set())
    monkeypatch.setattr(announcing, "tell", lines.append)
    return lines


def a_dead_process() -> int:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def write(folder: Path, locked: bool = False, **changes: Any) -> int:
    """What another job leaves in the lock's file, which is this one's but for some changes; the file, open."""
    descriptor = os.open(folder / ".ckpt.in-use", os.O_RDWR | os.O_CREAT)
    holder = dataclasses.replace(folder_lock._myself(), since=0.0, **changes)
    os.write(descriptor, json.dumps(dataclasses.asdict(holder)).encode())
    if locked:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def no_locks(*args: Any) -> None:
    raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))


def test_a_folder_is_held_until_it_is_released(tmp_path: Path) -> None:
    assert folder_lock.current(str(tmp_path), "ckpt") is None
    hold = folder_lock.take(str(tmp_path), "ckpt")
    assert hold.is_locked
    assert folder_lock.current(str(tmp_path), "ckpt") is hold
    assert json.loads((tmp_path / ".ckpt.in-use").read_text())["pid"] == os.getpid()
    # Those of another name are another folder, as it were.
    assert folder_lock.current(str(tmp_path), "best") is None
    folder_lock.take(str(tmp_path), "best")
    folder_lock._release_all()
    assert folder_lock.current(str(tmp_path), "ckpt") is None
    assert (tmp_path / ".ckpt.in-use").read_text() == ""
    folder_lock.take(str(tmp_path), "ckpt")


def test_another_job_is_named(tmp_path: Path) -> None:
    other = write(tmp_path, locked=True, host="node-7", pid=123, system="another one")
    with pytest.raises(CheckpointError) as raised:
        folder_lock.take(str(tmp_path), "ckpt")
    os.close(other)
    assert str(raised.value).startswith(
        f"The folder '{tmp_path}' is in use: the job of host node-7 (process 123, since "
    )
    assert str(raised.value).endswith(
        ") saves 'ckpt' there. Two jobs would delete each other's files. Wait until that job has ended, stop it, or "
        "give smp.CheckpointManager another folder or checkpoint_name."
    )
    # Its process has ended, and with it the lock.
    folder_lock.take(str(tmp_path), "ckpt")


def test_who_only_looks_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = write(tmp_path, locked=True)
    monkeypatch.setattr(folder_lock, "_PATIENCE", 20.0)
    monkeypatch.setattr(folder_lock.time, "sleep", lambda seconds: fcntl.flock(other, fcntl.LOCK_UN))
    folder_lock.take(str(tmp_path), "ckpt")
    os.close(other)


class TestLooking:
    def test_finds_a_live_job_and_holds_nothing(self, tmp_path: Path) -> None:
        folder_lock.require_unused(str(tmp_path / "none"), "ckpt")
        folder_lock.require_unused(str(tmp_path), "ckpt")
        assert list(tmp_path.iterdir()) == []
        other = write(tmp_path, pid=os.getppid(), began=folder_lock._began(os.getppid()))
        with pytest.raises(CheckpointError, match=rf"the job of host .* \(process {os.getppid()}, since "):
            folder_lock.require_unused(str(tmp_path), "ckpt")
        os.close(other)

    def test_goes_by_the_lock_of_another_host(self, tmp_path: Path) -> None:
        other = write(tmp_path, locked=True, host="node-7", pid=123, system="another one")
        with pytest.raises(CheckpointError, match=r"the job of host node-7 \(process 123, since "):
            folder_lock.require_unused(str(tmp_path), "ckpt")
        os.close(other)
        folder_lock.require_unused(str(tmp_path), "ckpt")
        folder_lock.take(str(tmp_path), "ckpt")

    def test_finds_no_job_where_this_one_holds_the_folder(self, tmp_path: Path) -> None:
        folder_lock.take(str(tmp_path), "ckpt")
        folder_lock.require_unused(str(tmp_path), "ckpt")


def test_a_child_of_a_job_that_ended_is_told_from_it(tmp_path: Path) -> None:
    other = write(tmp_path, locked=True, pid=a_dead_process())
    with pytest.raises(
        CheckpointError, match=r"That process has ended, but .* 'fuser .*\.ckpt\.in-use' names it\. End it\."
    ):
        folder_lock.take(str(tmp_path), "ckpt")
    os.close(other)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": 3}', "[" * 3000, '{"host": "\\u001b[2J"}', "\0" * 5000])
def test_whatever_stands_in_the_file_it_is_in_use(text: str, tmp_path: Path) -> None:
    with open(tmp_path / ".ckpt.in-use", "w") as file:
        file.write(text)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="the job of a process that it does not name saves 'ckpt' there"):
            folder_lock.take(str(tmp_path), "ckpt")


def test_a_forked_child_holds_nothing_for_its_parent(tmp_path: Path) -> None:
    seen, child = os.pipe(), os.pipe()
    parent = os.fork()
    if not parent:
        folder_lock.take(str(tmp_path), "ckpt")
        if not os.fork():
            os.close(seen[1])
            os.write(child[1], b".")  # It runs, so what is done at a fork is done.
            os.read(seen[0], 1)  # until the test has seen it
        os._exit(0)
    assert os.waitpid(parent, 0)[1] == 0
    os.close(child[1])
    assert os.read(child[0], 1) == b"."
    folder_lock.take(str(tmp_path), "ckpt")
    for end in (*seen, child[0]):
        os.close(end)


def test_a_folder_that_was_deleted_is_held_no_more(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    folder_lock.take(str(folder), "ckpt")
    (folder / ".ckpt.in-use").unlink()
    assert folder_lock.current(str(folder), "ckpt") is None
    folder_lock.take(str(folder), "ckpt")
    assert folder_lock.current(str(folder), "ckpt") is not None
    folder_lock.give_up(str(folder), "ckpt")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_what_is_no_file_is_not_opened(kind: str, tmp_path: Path) -> None:
    path = tmp_path / ".ckpt.in-use"
    if kind == "link":
        path.symlink_to(tmp_path / "outside")
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(CheckpointError, match=r"\.ckpt\.in-use says which job .* must be a file, .* Remove it\."):
        folder_lock.take(str(tmp_path), "ckpt")
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize("hidden", ["_BOOT", "_SPACE"])
def test_a_container_that_hides_its_system_can_save(
    hidden: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, hidden, str(tmp_path / "none"))
    assert folder_lock.take(str(tmp_path), "ckpt").is_locked
    assert json.loads((tmp_path / ".ckpt.in-use").read_text())["system"] == socket.gethostname()


def test_a_process_that_does_not_know_when_it_began_is_not_said_to_have_ended(tmp_path: Path) -> None:
    other = write(tmp_path, locked=True, began=0)
    with pytest.raises(CheckpointError, match=r"Two jobs would delete each other's files\. Wait until"):
        folder_lock.take(str(tmp_path), "ckpt")
    os.close(other)


def test_a_file_that_is_another_one_each_time_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, before = folder_lock._opened, set(os.listdir("/proc/self/fd"))

    def deleted(path: str) -> int:
        descriptor = opened(path)
        os.unlink(path)
        return descriptor

    monkeypatch.setattr(folder_lock, "_opened", deleted)
    with pytest.raises(CheckpointError, match=r"was another file each of the 100 times that it was opened: something"):
        folder_lock.take(str(tmp_path), "ckpt")
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_full_disk_does_not_keep_a_job_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    assert folder_lock.take(str(tmp_path), "ckpt").is_locked


class TestWithoutLocks:
    """Of a file system that has none, or shows them to one host only, the file's content is what is known."""

    def test_a_live_process_of_this_host_is_seen(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fcntl, "flock", no_locks)
        os.close(write(tmp_path, pid=os.getppid(), began=folder_lock._began(os.getppid())))
        with pytest.raises(CheckpointError, match=f"process {os.getppid()}, since .* saves 'ckpt' there"):
            folder_lock.take(str(tmp_path), "ckpt")

    @pytest.mark.parametrize("pid", ["dead", "reused"])
    def test_a_dead_one_does_not_count(
        self, pid: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
    ) -> None:
        monkeypatch.setattr(fcntl, "flock", no_locks)
        number = a_dead_process() if pid == "dead" else os.getppid()
        os.close(write(tmp_path, pid=number, began=1))
        assert not folder_lock.take(str(tmp_path), "ckpt").is_locked
        [line] = said
        assert line.startswith(
            f"smp_tf: the file system of {tmp_path} has no locks (flock), so a second job that saves"
        )

    @pytest.mark.parametrize("locks", [True, False])
    def test_of_another_host_it_is_said_what_is_known(
        self, locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
    ) -> None:
        if not locks:
            monkeypatch.setattr(fcntl, "flock", no_locks)
        os.close(write(tmp_path, host="node-7", pid=123, system="another one"))
        assert folder_lock.take(str(tmp_path), "ckpt").is_locked == locks
        [line] = said
        assert line.startswith(
            f"smp_tf: the last job that saved 'ckpt' into {tmp_path}, that of host node-7 (process 123, since "
        )
        assert "has not said that it ended." in line

    def test_one_that_ended_in_good_order_is_forgotten(self, tmp_path: Path, said: list[str]) -> None:
        folder_lock.take(str(tmp_path), "ckpt")
        folder_lock._release_all()
        folder_lock.take(str(tmp_path), "ckpt")
        assert said == []
