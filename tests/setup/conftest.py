"""Makes the set-up program importable, and runs it as a user does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))


@pytest.fixture
def root() -> Path:
    return ROOT


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the set-up program in it and nothing set up."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "tools", folder / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """A folder to be the whole PATH: it has what every machine has, but no Python and no g++."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "env", "cat", "rm", "make"):
        program = shutil.which(name)
        assert program is not None
        (folder / name).symlink_to(program)
    return folder


def program(path: Path, text: str) -> None:
    """Writes an executable shell script."""
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


def run_setup(checkout: Path, before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the set-up program in a process of its own.

    `before` is Python that runs first and may change what the program sees of its interpreter.
    """
    script = str(checkout / "tools" / "setup_env.py")
    code = f"import runpy, sys; sys.argv = [{script!r}]\n{before}\nrunpy.run_path({script!r}, run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=120,
    )
