"""The wheel and the source distribution: built, installed into a clean environment, imported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

# They compile the ops: half a minute each.
pytestmark = pytest.mark.large

IMPORTS = """
import importlib, json
names = ["smp_tf", "smp_tf.ops", "smp_tf.partition", "smp_tf.pipeline", "smp_tf.partition.errors",
    "smdistributed.modelparallel.tensorflow"]
print(json.dumps({name: importlib.import_module(name).__file__ for name in names}))
"""
FOLDERS = {
    "smp_tf": "smp_tf",
    "smp_tf.ops": "ops",
    "smp_tf.partition": "partition",
    "smp_tf.pipeline": "pipeline",
    "smp_tf.partition.errors": "partition",
    "smdistributed.modelparallel.tensorflow": "smdistributed/modelparallel/tensorflow",
}


def run(command: list[str | Path], cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # What is built here runs no longer than it takes to import it.
    env["CXXFLAGS"] = "-O0 -g0"
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(folder: Path, kind: str, target: Path) -> Path:
    """Builds a wheel or an sdist of a source tree with the build backend of this environment."""
    target.mkdir()
    code = f"from setuptools.build_meta import build_{kind} as b; b({str(target)!r})"
    run([sys.executable, "-c", code], folder)
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, with the compiled ops, in which a build may leave things."""
    target = tmp_path_factory.mktemp("packaging") / "tree"
    ignored = shutil.ignore_patterns(".git", ".venv*", ".setup", "bazel-*", "build", ".*_cache")
    return shutil.copytree(Path(__file__).resolve().parents[2], target, ignore=ignored)


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    return build(tree, "wheel", tree.parent / "wheel")


class Environment:
    """A new virtual environment that sees TensorFlow and its kin, but no smp_tf."""

    def __init__(self, folder: Path) -> None:
        run([sys.executable, "-m", "venv", "--without-pip", folder], folder.parent)
        self.python = folder / "bin" / "python"
        where = "import sysconfig; print(sysconfig.get_path('purelib'))"
        packages = Path(run([self.python, "-c", where], folder).strip())
        # A path in a .pth file is searched, but .pth files found there are not followed: an
        # editable smp_tf in this environment stays invisible.
        (packages / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
        self.site = packages

    def install(self, *arguments: str | Path) -> None:
        command: list[str | Path] = [sys.executable, "-m", "pip", "--python", self.python]
        command += ["install", "--no-index", "--no-deps", "--no-build-isolation", *arguments]
        run(command, self.site)

    def imported(self, cwd: Path) -> dict[str, str]:
        """Where each of our packages is imported from by a script in `cwd`."""
        found = run([self.python, "-c", IMPORTS], cwd)
        return json.loads(found)


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "env")


def test_the_wheel_holds_the_package_and_its_ops(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "smp_tf/__init__.py",
        "smp_tf/ops/__init__.py",
        "smp_tf/ops/_transport.so",
        "smp_tf/ops/_tf_ops.so",
        "smp_tf/ops/_build.json",
        "smp_tf/partition/__init__.py",
        "smp_tf/pipeline/__init__.py",
        "smdistributed/modelparallel/tensorflow/__init__.py",
        "smdistributed/modelparallel/tensorflow/utils.py",
    } <= names
    # Namespaces, in which other distributions may have packages of their own.
    assert not {"smdistributed/__init__.py", "smdistributed/modelparallel/__init__.py"} & names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"smp_tf", "smdistributed"}
    assert wheel.name.endswith("linux_x86_64.whl") or wheel.name.endswith("linux_aarch64.whl")


def test_the_metadata_requires_no_tensorflow(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    lines = archive.read(name).decode().splitlines()
    required = [line for line in lines if line.startswith("Requires-Dist:")]
    assert [line for line in required if "tensorflow" in line and "extra ==" not in line] == []
    assert {"Provides-Extra: cpu", "Provides-Extra: gpu"} <= set(lines)


def test_an_installed_wheel_is_imported_from_anywhere(wheel: Path, environment: Environment, tmp_path: Path) -> None:
    environment.install(wheel)
    site = environment.site / "smp_tf"
    found = environment.imported(tmp_path)
    assert Path(found["smp_tf"]).parent == site
    assert Path(found["smp_tf.ops"]).parent == site / "ops"
    assert Path(found["smp_tf.pipeline"]).parent == site / "pipeline"
    alias = "smdistributed/modelparallel/tensorflow"
    assert Path(found[alias.replace("/", ".")]).parent == environment.site / alias
    load = "from smp_tf.ops.library import tf_ops_library as load; print(load().__name__)"
    assert run([environment.python, "-c", load], tmp_path).strip() != ""


def test_in_the_repository_the_sources_come_first(wheel: Path, environment: Environment, tree: Path) -> None:
    environment.install(wheel)
    found = environment.imported(tree)
    assert {name: Path(file).parent for name, file in found.items()} == {
        name: tree / folder for name, folder in FOLDERS.items()
    }


def test_an_editable_install_is_imported_from_the_sources(tree: Path, environment: Environment, tmp_path: Path) -> None:
    environment.install("--editable", tree)
    found = environment.imported(tmp_path)
    assert {name: Path(file).parent for name, file in found.items()} == {
        name: tree / folder for name, folder in FOLDERS.items()
    }


@pytest.mark.full
def test_a_source_distribution_compiles_and_installs(tree: Path, environment: Environment, tmp_path: Path) -> None:
    sdist = build(tree, "sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        assert [name for name in archive.getnames() if name.endswith(".so")] == []
        archive.extractall(tmp_path, filter="data")
    (sources,) = tmp_path.glob("smp_tf-*")
    environment.install(build(sources, "wheel", tmp_path / "wheel"))
    found = environment.imported(tmp_path)
    assert Path(found["smp_tf.ops"]).parent == environment.site / "smp_tf" / "ops"
