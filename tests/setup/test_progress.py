"""A failed command's one line of cause."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from setup_prerequisites import SetupFailure
from setup_progress import Progress, cause_of, duration
from setup_state import ChildRecord


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        (
            "WARNING: retrying\nERROR: No matching distribution found for nosuch==1\nERROR: more\n",
            "ERROR: No matching distribution found for nosuch==1",
        ),
        (
            "a.cc:1:1: warning: dull\na.cc:3:9: error: 'x' was not declared\nmake: *** Error 2\n",
            "a.cc:3:9: error: 'x' was not declared",
        ),
        (
            "CMake Error at CMakeLists.txt:7 (find_package):\n  ...",
            "CMake Error at CMakeLists.txt:7 (find_package):",
        ),
        (
            "Traceback (most recent call last):\n  File\nImportError: no ops\n",
            "ImportError: no ops",
        ),
        (
            "  error: subprocess-exited-with-error\n      error: no such folder\nERROR: Failed\n",
            "error: no such folder",
        ),
        ("first\nlast line\n", "last line"),
        ("", "it printed nothing"),
    ],
)
def test_cause(output: str, cause: str) -> None:
    assert cause_of(output) == cause


@pytest.mark.parametrize(
    ("output", "what_to_do"),
    [
        ("OSError: [Errno 28] No space left on device", "df -h"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "MAKEFLAGS=-j1"),
        ("ssl.SSLError: CERTIFICATE_VERIFY_FAILED", "apt-get install ca-certificates"),
        ("Failed to establish a new connection\nERROR: No matching distribution", "PIP_INDEX_URL"),
    ],
)
def test_a_known_cause_says_what_to_do(output: str, what_to_do: str) -> None:
    assert what_to_do in cause_of(output)


def test_duration() -> None:
    assert [duration(s) for s in (0.2, 59.2, 60, 125)] == [
        "0 s",
        "59 s",
        "1 min 00 s",
        "2 min 05 s",
    ]


def test_a_failed_command_ends_its_step_with_the_cause(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "log", ChildRecord(tmp_path / "child"))
    command = ["sh", "-c", "echo 'ERROR: the cause'; echo; exit 3"]
    with pytest.raises(SetupFailure, match=r"^third: ERROR: the cause$"), progress.step("third"):
        progress.run(command, dict(os.environ), tmp_path)
    assert not (tmp_path / "child").exists()
    assert "ERROR: the cause" in (tmp_path / "log").read_text()


def test_on_a_terminal_the_line_moves(tmp_path: Path) -> None:
    tools = str(Path(__file__).resolve().parents[2] / "tools")
    code = (
        "import pathlib\n"
        "from setup_progress import Progress\n"
        "from setup_state import ChildRecord\n"
        "here = pathlib.Path('.'); p = Progress(here / 'log', ChildRecord(here / 'child'))\n"
        "with p.step('title'): p.move('[  7%] Building x'); p.move('[  8%] Building y')\n"
    )
    master, slave = os.openpty()
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": tools},
        stdout=slave,
        check=True,
        timeout=60,
    )
    os.close(slave)
    shown = os.read(master, 65536).decode()
    os.close(master)
    assert shown == "\r\x1b[K/ title 0 s  [  7%] Building x" + (
        "\r\x1b[K- title 0 s  [  8%] Building y" + "\r\x1b[Ktitle: 0 s\r\n"
    )
