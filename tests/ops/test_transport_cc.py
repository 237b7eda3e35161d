"""Builds and runs the C++ tests of the transport library."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from smp_tf.ops import build

SOURCES = Path(__file__).resolve().parent / "cc"


@pytest.mark.parametrize("name", ["codes_test", "timeline_test", "transport_test"])
def test_cc(name: str, tmp_path: Path) -> None:
    transport = build.transport_target()
    library = build.HERE / "_transport.so"
    own = {
        "codes_test": ["json.cc", "message.cc", "sha256.cc"],
        "timeline_test": [],
        "transport_test": ["address.cc", "message.cc", "sha256.cc"],
    }[name]
    ucx = build.ucx_folder()
    program = build.build_target(
        build.Target(
            name,
            (SOURCES / f"{name}.cc", *(build.HERE / "cc" / "transport" / file for file in own)),
            (*transport.compile_flags, f"-I{SOURCES}"),
            (
                # Loaded by this program first, UCX is there for the library that needs it.
                "-Wl,--no-as-needed,--disable-new-dtags",
                str(library),
                f"-Wl,-rpath,{library.parent}",
                f"-L{ucx / 'lib'}",
                "-lucp",
                "-lucs",
                f"-Wl,-rpath,{ucx / 'lib'}",
                "-pthread",
            ),
        ),
        tmp_path,
        verbose=False,
    )
    environment = {**os.environ, "UCX_LOG_LEVEL": "error", "UCX_HANDLE_ERRORS": "none"}
    result = subprocess.run([str(program)], capture_output=True, text=True, timeout=260, env=environment, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{name}: ok" in result.stdout
