"""Cores are kept awake by processes that give way to all others, and that are gone afterwards."""

from __future__ import annotations

import os

import pytest


def test_each_core_has_a_process_that_gives_way() -> None:
    from harness.awake import cores_awake

    with cores_awake() as pids:
        assert [os.sched_getaffinity(pid) for pid in pids] == [{core} for core in sorted(os.sched_getaffinity(0))]
        assert {os.sched_getscheduler(pid) for pid in pids} == {os.SCHED_IDLE}
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
