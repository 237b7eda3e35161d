"""The Makefile and continuous integration run what they say, and fail when they should."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ALL_SEVERAL, SOME_SEVERAL

from .conftest import program


@pytest.mark.parametrize(
    ("printed", "status", "expected"),
    [
        ("===== 12 passed, 1 skipped in 3.14s =====", 0, 0),
        ("===== 1 failed, 12 passed in 3.14s =====", 2, 2),
        ("===== 3 skipped in 3.14s =====", 0, 1),
        ("===== no tests ran in 0.01s =====", 2, 2),
        ("", 0, 1),
    ],
)
def test_continuous_integration(tmp_path: Path, root: Path, printed: str, status: int, expected: int) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(root / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin" / "make", f'echo "make $*"; echo "{printed}"; exit {status}\n')
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    command = [str(tmp_path / ".ci" / "run")]
    done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=60)
    assert done.returncode == expected
    assert done.stdout.splitlines() == ["make test", printed]


def commands_of(root: Path, target: str, *variables: str) -> str:
    """What `make target` would run."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--dry-run", target, *variables]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("target", "environment"), [("test", ".venv"), ("test-oldest", ".venv-oldest")])
def test_unit_tests_come_first_and_every_part_looks_where_its_tests_are(
    root: Path, target: str, environment: str
) -> None:
    told = commands_of(root, target)
    parts = told.split(" python -m pytest ")[1:]
    marked = [re.search(r'-m "(.*?)"', part) for part in parts]
    expected = ["not distributed", "distributed and not alone", "distributed and alone"]
    assert [found.group(1) for found in marked if found] == expected
    assert told.count(f'VIRTUAL_ENV="{root / environment}" python -m pytest ') == len(parts)
    units, *several = [[word.rstrip("/") for word in part.split() if word.startswith("tests/")] for part in parts]
    there = {f"tests/{path.parent.name}" for path in (root / "tests").glob("*/test_*.py")} | {
        f"tests/{path.parent.parent.name}" for path in (root / "tests").glob("*/*/test_*.py")
    }
    # tests/conftest.py refuses tests of several processes anywhere else.
    assert units == sorted(there - {f"tests/{name}" for name in ALL_SEVERAL})
    assert several == [[f"tests/{name}" for name in (*SOME_SEVERAL, *ALL_SEVERAL)]] * 2


def test_the_oldest_tensorflow_is_never_put_into_another_environment(root: Path) -> None:
    told = commands_of(root, "test-oldest", "VENV=/elsewhere")
    assert "/elsewhere" not in told
    assert f"--venv={root / '.venv-oldest'}" in told


@pytest.mark.parametrize(
    ("statuses", "ran", "expected"),
    [
        ((5, 5, 0), 3, 0),
        ((5, 5, 1), 3, 2),
        ((1, 0, 0), 3, 2),
        ((0, 1, 5), 3, 2),
        ((2, 0, 0), 1, 2),
    ],
    ids=["nothing in a part", "the last fails", "the first fails", "one fails, one is empty", "interrupted"],
)
def test_all_parts_run_and_the_run_fails_when_one_did(
    tmp_path: Path, root: Path, statuses: tuple[int, ...], ran: int, expected: int
) -> None:
    shutil.copy(root / "Makefile", tmp_path)
    (tmp_path / "tests" / "room").mkdir(parents=True)
    (tmp_path / "tests" / "room" / "test_it.py").write_text("")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    first, second, third = statuses
    python = (
        'echo "$*" >> parts\n'
        f'case "$*" in *"-m not distributed"*) exit {first};; *"not alone"*) exit {second};; *) exit {third};; esac\n'
    )
    program(tmp_path / ".venv" / "bin" / "python", python)
    command = ["make", "PYTHON=true", "test"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == expected, done.stderr
    assert len((tmp_path / "parts").read_text().splitlines()) == ran


def test_the_demo_is_the_documented_command(root: Path) -> None:
    lines = commands_of(root, "demo").splitlines()
    assert "tools/setup_env.py" in lines[0]
    assert lines[1].endswith("smp-tf run -np 2 examples/digits.py --epochs 5")
    assert lines[2].endswith("python examples/load_digits.py")


def test_help_lists_every_command(root: Path) -> None:
    makefile = (root / "Makefile").read_text()
    phony = next(line for line in makefile.splitlines() if line.startswith(".PHONY:"))
    listed = subprocess.run(["make", "help"], cwd=root, capture_output=True, text=True, check=True, timeout=60).stdout
    assert [line.split()[0] for line in listed.splitlines() if line[:1].isalpha()] == phony.split()[1:]
