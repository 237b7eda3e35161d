"""Of a rank that has been killed no shared memory is left, and that of others stays."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from smp_tf.start import shared_memory
from tests.distributed.left_behind import sysv_segments_left

PAGE = os.sysconf("SC_PAGESIZE")
MAKE = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
made = libc.shmget({key}, {size}, 0o1600)
{then}
print(made, os.getpid(), flush=True)
input()
"""


class Maker:
    """A process that has made a segment.

    Args:
        key: of the segment; 0 for one of its own.
        size: in bytes.
        then: what it does with it.
    """

    def __init__(self, key: int = 0, size: int = PAGE, then: str = "") -> None:
        script = MAKE.format(key=key, size=size, then=then)
        self.process = subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.segment, self.pid = map(int, self.process.stdout.readline().split())
        assert self.segment >= 0

    def left(self) -> list[str]:
        """What there is of it."""
        return sysv_segments_left({self.pid})

    def kill(self) -> None:
        """Kills it."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def removed() -> Iterator[list[Maker]]:
    """Those whose segments are removed in the end."""
    makers: list[Maker] = []
    yield makers
    for maker in makers:
        maker.kill()
        shared_memory._libc.shmctl(maker.segment, 0, None)


def test_what_a_killed_process_has_left_is_removed(removed: list[Maker]) -> None:
    """UCX's page of a rank that was killed while it loaded UCX stayed until the machine was started again."""
    maker = Maker()
    removed.append(maker)
    maker.kill()
    assert len(maker.left()) == 1
    shared_memory.remove_left_by(maker.pid)
    assert maker.left() == []
    # As a rank does that is slower.
    shared_memory.remove_left_by(maker.pid)


def test_what_is_of_others_or_in_use_stays(removed: list[Maker]) -> None:
    gone, shared, large = Maker(), Maker(key=os.getpid()), Maker(size=2 * PAGE)
    used = Maker(then="libc.shmat(made, 0, 0)")
    removed += [gone, shared, large, used]
    for maker in (gone, shared, large):
        maker.kill()
    for pid in (shared.pid, large.pid, used.pid):
        shared_memory.remove_left_by(pid)
    assert [len(maker.left()) for maker in removed] == [1, 1, 1, 1]


def test_what_is_unmapped_a_moment_later_is_removed(removed: list[Maker], monkeypatch: pytest.MonkeyPatch) -> None:
    """The process had ended, and a thread of it had not."""
    monkeypatch.setattr(shared_memory, "_UNMAPPING_TIME", 60.0)
    maker = Maker(then="libc.shmat(made, 0, 0)")
    removed.append(maker)
    looked = threading.Event()
    made_by = shared_memory._made_by

    def look(pid: int) -> dict[int, bool]:
        found = made_by(pid)
        looked.set()
        return found

    monkeypatch.setattr(shared_memory, "_made_by", look)
    removing = threading.Thread(target=shared_memory.remove_left_by, args=[maker.pid])
    removing.start()
    assert looked.wait(20.0)
    maker.kill()
    removing.join()
    assert maker.left() == []


def test_what_is_old_stays(removed: list[Maker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process had the number before."""
    maker = Maker()
    removed.append(maker)
    maker.kill()
    monkeypatch.setattr(shared_memory, "_OLDEST", -10.0)
    shared_memory.remove_left_by(maker.pid)
    assert len(maker.left()) == 1


def test_a_system_without_segments_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_LIST", shared_memory._LIST / "nothing")
    shared_memory.remove_left_by(1)
