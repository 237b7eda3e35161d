"""What UCX is told while it is loaded, and that it heeds it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from smp_tf.ops.library import ucx_load_settings
from tests.ops.rank_fleet import ROOT

# Prints how many System V segments were made while UCX was loaded, by whomever: the system numbers them in turn.
SEGMENTS = """
import ctypes
from smp_tf.ops import library

libc = ctypes.CDLL(None)

def next_number():
    segment = libc.shmget(0, 4096, 0o600)
    assert segment >= 0 and libc.shmctl(segment, 0, None) == 0
    return segment

before = next_number()
between = next_number() - before
before = next_number()
if {off}:
    library.ucx_load_settings = lambda: dict(library.UCX_LOAD_SETTINGS)
library.transport_library()
print((next_number() - before) // between - 1)
"""


def segments_made(with_hooks: bool) -> list[int]:
    """By several processes: others on the machine may make segments at the same time."""
    script = SEGMENTS.format(off=with_hooks)
    return [
        int(subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=True, text=True).stdout)
        for _ in range(3)
    ]


@pytest.mark.parametrize("device", ["sys/class/infiniband", "dev/nvidiactl"])
def test_ucx_hears_of_unmapped_memory_where_it_is_registered_with_a_device(device: str, tmp_path: Path) -> None:
    assert ucx_load_settings(tmp_path)["UCX_MEM_EVENTS"] == "n"
    (tmp_path / device).mkdir(parents=True)
    assert "UCX_MEM_EVENTS" not in ucx_load_settings(tmp_path)


@pytest.mark.skipif("UCX_MEM_EVENTS" not in ucx_load_settings(), reason="memory is registered with a device here")
def test_ucx_makes_no_segment_that_a_killed_process_could_leave_behind() -> None:
    """A rank that was killed while UCX was loaded left a page of shared memory."""
    assert min(segments_made(with_hooks=True)) >= 1, "UCX tries its hooks in another way: this test sees nothing"
    assert min(segments_made(with_hooks=False)) == 0
