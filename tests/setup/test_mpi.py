"""Horovod is compiled with MPI where there is one, and kept apart from one that was compiled otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import setup_steps

from .conftest import program


@pytest.fixture
def bin_of(bare_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on PATH: it has a compiler, and no MPI until a test puts one there."""
    program(bare_path / "g++", "echo 'g++ 12.2.0'\n")
    monkeypatch.setenv("PATH", str(bare_path))
    monkeypatch.setattr(setup_steps, "STATE", tmp_path / "state")
    return bare_path


@pytest.fixture
def setup(bin_of: Path, tmp_path: Path) -> setup_steps.Setup:
    return setup_steps.Setup("current", tmp_path / "environment")


def choice(setup: setup_steps.Setup) -> dict[str, str]:
    """What Horovod's build is told of MPI."""
    return {name: value for name, value in setup._horovod_settings().items() if name.endswith("_MPI")}


def horovod_key(setup: setup_steps.Setup) -> str:
    return next(step.key for step in setup.steps() if step.name == "horovod")


def test_without_mpicxx_horovod_has_no_mpi(setup: setup_steps.Setup) -> None:
    assert choice(setup) == {"HOROVOD_WITHOUT_MPI": "1"}


def test_with_mpicxx_horovod_has_mpi_beside_gloo(setup: setup_steps.Setup, bin_of: Path) -> None:
    program(bin_of / "mpicxx", "echo 'g++ -I/usr/lib/openmpi/include -lmpi_cxx'\n")
    assert choice(setup) == {"HOROVOD_WITH_MPI": "1"}
    assert setup._horovod_settings()["HOROVOD_WITH_GLOO"] == "1"


def test_an_mpi_that_comes_goes_or_changes_compiles_horovod_again(setup: setup_steps.Setup, bin_of: Path) -> None:
    places, keys = [setup._horovod_cache()], [horovod_key(setup)]
    for flags in ("-I/usr/lib/openmpi/include", "-I/usr/lib/mpich/include"):
        program(bin_of / "mpicxx", f"[ \"$1\" = -show ] && echo 'g++ {flags}'\n")
        places.append(setup._horovod_cache())
        keys.append(horovod_key(setup))
    assert len(set(places)) == len(set(keys)) == 3
    (bin_of / "mpicxx").unlink()
    assert setup._horovod_cache() == places[0]
    assert horovod_key(setup) == keys[0]
