"""What is missing on the machine is named, with the command that installs it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import setup_env

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
    assert f"python3 is Python {name}, too {kind}: Python 3.10 to 3.13 is needed, and none is on PATH" in done.stderr
    assert done.stderr.strip().endswith(setup_env.way(["3.10", "3.11", "3.12", "3.13"], setup_env.system()))


APT = "Install: sudo apt-get install python{0} python{0}-venv, then run this again"
DEADSNAKES = APT.format("3.13").replace("sudo", "sudo add-apt-repository ppa:deadsnakes/ppa && sudo")
UV = "uv python install 3.13 && make setup PYTHON=$(uv python find 3.13)"


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        pytest.param("ID=debian\nVERSION_CODENAME=bookworm", APT.format("3.11"), id="Debian 12"),
        pytest.param("ID=debian\nVERSION_CODENAME=trixie", APT.format("3.13"), id="Debian 13"),
        pytest.param("ID=ubuntu\nUBUNTU_CODENAME=jammy\nVERSION_CODENAME=jammy", APT.format("3.10"), id="Ubuntu 22.04"),
        pytest.param("ID=ubuntu\nVERSION_CODENAME=noble", APT.format("3.12"), id="Ubuntu 24.04"),
        pytest.param(
            'ID=linuxmint\nID_LIKE="ubuntu debian"\nVERSION_CODENAME=wilma\nUBUNTU_CODENAME=noble',
            APT.format("3.12"),
            id="Mint 22",
        ),
        # Python 3.8 and 3.14.
        pytest.param('ID=ubuntu\nVERSION_CODENAME="focal"', DEADSNAKES, id="Ubuntu 20.04"),
        pytest.param("ID=ubuntu\nVERSION_CODENAME=resolute", DEADSNAKES, id="Ubuntu 26.04"),
        pytest.param(
            'PRETTY_NAME="Debian GNU/Linux 11 (bullseye)"\nID=debian\nVERSION_CODENAME=bullseye',
            f"Debian GNU/Linux 11 (bullseye) is not known to have a package of one. Install uv, then: {UV}",
            id="Debian 11, with 3.9",
        ),
        pytest.param("", f"this system is not known to have a package of one. Install uv, then: {UV}", id="silent"),
    ],
)
def test_the_command_for_a_python_is_one_that_works_there(
    release: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once was that of a release that has Python 3.13, on every other as well."""
    (tmp_path / "os-release").write_text(release)
    monkeypatch.setattr(setup_env, "OS_RELEASE", str(tmp_path / "os-release"))
    assert setup_env.way(["3.10", "3.11", "3.12", "3.13"], setup_env.system()) == expected


def test_a_packaged_python_that_the_oldest_tensorflow_does_not_support_is_not_advised() -> None:
    found = setup_env.way(["3.10", "3.11", "3.12"], {"ID": "debian", "VERSION_CODENAME": "trixie"})
    assert "uv python install 3.12" in found


def test_a_system_that_does_not_say_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_env, "OS_RELEASE", str(tmp_path / "missing"))
    assert setup_env.system() == {}


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
