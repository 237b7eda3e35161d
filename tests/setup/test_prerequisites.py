"""What is missing on the machine is named, with the command that installs it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from .conftest import program, run_setup

VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
GXX_12 = "echo '12.2.0'\n"


def too(version: str) -> str:
    return f"sys.version_info = ({version}, 0, 'final', 0)"


def test_a_missing_compiler_is_named_with_its_package(checkout: Path, bare_path: Path) -> None:
    done = run_setup(checkout, PATH=str(bare_path))
    assert done.returncode == 1
    assert done.stderr.strip() == ("set-up failed: g++ is missing. Install: sudo apt-get install g++")


def test_all_that_is_missing_is_named_at_once(checkout: Path, bare_path: Path) -> None:
    (bare_path / "make").unlink()
    done = run_setup(checkout, before="sys.modules['ensurepip'] = None", PATH=str(bare_path))
    assert done.returncode == 1
    assert f"the venv module of Python {VERSION} and g++ and make are missing" in done.stderr
    assert f"sudo apt-get install python{VERSION}-venv g++ make" in done.stderr


def test_a_python_without_ensurepip(checkout: Path, bare_path: Path) -> None:
    program(bare_path / "g++", GXX_12)
    done = run_setup(checkout, before="sys.modules['ensurepip'] = None", PATH=str(bare_path))
    assert done.returncode == 1
    assert done.stderr.strip() == (
        f"set-up failed: the venv module of Python {VERSION} is missing. "
        f"Install: sudo apt-get install python{VERSION}-venv"
    )


def test_an_old_compiler(checkout: Path, bare_path: Path) -> None:
    program(bare_path / "g++", "echo 7\n")
    done = run_setup(checkout, PATH=str(bare_path))
    assert done.returncode == 1
    assert "g++ 9 or newer is needed (C++17); found 7." in done.stderr


@pytest.mark.parametrize(("version", "kind"), [("3, 9", "old"), ("3, 14", "new")])
def test_a_python_that_is_not_supported(checkout: Path, bare_path: Path, version: str, kind: str) -> None:
    done = run_setup(checkout, before=too(version), PATH=str(bare_path))
    assert done.returncode == 1
    name = version.replace(", ", ".")
    assert f"python3 is Python {name}, too {kind}: Python 3.10 to 3.13 is needed" in done.stderr
    assert "sudo apt-get install python3.13 python3.13-venv" in done.stderr


def test_a_supported_python_on_path_is_used_instead(checkout: Path, bare_path: Path) -> None:
    # A version manager's shim is there for every version it knows, and fails for all but one.
    program(bare_path / "python3.13", "exit 127\n")
    program(bare_path / "python3.12", '[ "$1" = -c ] && echo 3.12 || echo "ran $*"\n')
    done = run_setup(checkout, before=too("3, 14"), PATH=str(bare_path))
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "set-up: python3 is Python 3.14; using python3.12 from PATH",
        f"ran {checkout}/tools/setup_env.py",
    ]


@pytest.mark.parametrize("name", ["setup_env.py", "setup_versions.py"])
def test_the_version_check_parses_on_an_old_python(root: Path, name: str) -> None:
    ast.parse((root / "tools" / name).read_text(), feature_version=(3, 5))


def test_no_registry(checkout: Path) -> None:
    done = run_setup(
        checkout,
        PIP_CONFIG_FILE="/dev/null",
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
        PIP_FIND_LINKS="",
        PIP_RETRIES="1",
        PIP_NO_CACHE_DIR="1",
    )
    assert done.returncode == 1
    cause, where = done.stderr.strip().splitlines()
    assert "no pip registry can be reached" in cause
    assert "export PIP_INDEX_URL=" in cause
    assert where == "The log is .setup/.venv.log"
    assert "127.0.0.1" in (checkout / ".setup" / ".venv.log").read_text()


def test_a_foreign_environment_is_left_alone(checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "mine").write_text("precious")
    done = run_setup(checkout)
    assert done.returncode == 1
    assert "was not made by this set-up, so it is left alone" in done.stderr
    assert "mv .venv .venv.mine" in done.stderr
    assert (checkout / ".venv" / "mine").read_text() == "precious"
