"""Memory that is free goes back to the system once, after the first steps of a program."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from smp_tf.job import at_shutdown, runtime
from smp_tf.steps import free_memory

MIB = 2**20


class Steps:
    """What is asked of a transport: a step that ends when a test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, bool]] = []
        self.ended, self._goes_on = threading.Event(), True

    def await_step(self, program: int, step: int, *, ended: bool) -> bool:
        self.asked.append((program, step, ended))
        self.ended.wait()
        return self._goes_on

    def stop_awaiting(self) -> None:
        self._goes_on = self.ended.is_set()
        self.ended.set()


@pytest.fixture
def returned(init: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> tuple[Steps, threading.Event]:
    """A job with steps to wait for; the event is set when memory is returned."""
    init()
    steps, event = Steps(), threading.Event()
    monkeypatch.setattr(runtime, "current", lambda: SimpleNamespace(transport=steps))
    monkeypatch.setattr(free_memory, "returning_function", lambda: event.set)
    return steps, event


def test_it_is_returned_after_the_second_step(returned: tuple[Steps, threading.Event]) -> None:
    steps, event = returned
    free_memory.return_after_first_steps(7)
    free_memory.return_after_first_steps(7)
    assert not event.is_set()
    steps.ended.set()
    assert event.wait(20)
    at_shutdown.run_before_leaving()
    assert steps.asked == [(7, 1, True)]


def test_a_job_that_ends_before_returns_nothing(returned: tuple[Steps, threading.Event]) -> None:
    steps, event = returned
    free_memory.return_after_first_steps(7)
    at_shutdown.run_before_leaving()
    assert steps.ended.is_set()
    assert not event.is_set()


def test_the_c_library_gives_back_what_is_free_below_memory_in_use() -> None:
    give_back = free_memory.returning_function()
    if give_back is None:
        pytest.skip("this C library has no malloc_trim, and smp_tf returns nothing then")
    library = ctypes.CDLL(None)
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    pieces = [library.malloc(ctypes.c_size_t(16384)) for _ in range(4096)]
    for piece in pieces:
        ctypes.memset(piece, 1, 16384)
    for piece in pieces[:-1]:
        library.free(piece)
    before = resident()
    give_back()
    library.free(pieces[-1])
    assert before - resident() > 48 * MIB


def resident() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return 1024 * int(line.split()[1])
