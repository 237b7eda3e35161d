"""Builds and runs the C++ tests of the transport library."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from smp_tf.ops import build

SOURCES = Path(__file__).resolve().parent / "cc"


@pytest.mark.parametrize(
    "name",
    [
        "codes_test",
        "endings_test",
        "huge_pages_test",
        "peer_memory_test",
        "refusals_test",
        "timeline_test",
        "transport_test",
    ],
)
def test_cc(name: str, tmp_path: Path) -> None:
    own = {
        "codes_test": ["json.cc", "message.cc", "plain_text.cc", "sha256.cc"],
        "endings_test": [],
        "peer_memory_test": ["address.cc", "peer_memory.cc", "second_reader.cc", "sha256.cc"],
        "huge_pages_test": ["huge_pages.cc"],
        "refusals_test": [],
        "timeline_test": [],
        "transport_test": ["address.cc", "message.cc", "pair_codes.cc", "sha256.cc"],
    }[name]
    program = build.build_target(build.program_target(SOURCES / f"{name}.cc", own), tmp_path, verbose=False)
    environment = {**os.environ, "UCX_LOG_LEVEL": "error", "UCX_HANDLE_ERRORS": "none"}
    result = subprocess.run([str(program)], capture_output=True, text=True, timeout=260, env=environment, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{name}: ok" in result.stdout
