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
from importlib.metadata import version
from pathlib import Path

import pytest

# They build, install and import: seconds each.
pytestmark = pytest.mark.large

STARTED = """
import smp_tf as smp
import tensorflow as tf
smp.init({"partitions": 1, "microbatches": 2})
"""
IMPORTS = """
import importlib, json
names = ["smp_tf", "smp_tf.ops", "smp_tf.partition", "smp_tf.pipeline", "smp_tf.partition.errors",
    "smdistributed.modelparallel.tensorflow"]
print(json.dumps({name: importlib.import_module(name).__file__ for name in names}))
"""
ALL_FOLDERS = (
    "benchmarks",
    "docs",
    "examples",
    "ops",
    "partition",
    "pipeline",
    "smdistributed",
    "smp_tf",
    "tests",
    "tools",
)
COMPILED = ("_transport.so", "_tf_ops.so", "_build.json")
FOLDERS = {
    "smp_tf": "smp_tf",
    "smp_tf.ops": "ops",
    "smp_tf.partition": "partition",
    "smp_tf.pipeline": "pipeline",
    "smp_tf.partition.errors": "partition",
    "smdistributed.modelparallel.tensorflow": "smdistributed/modelparallel/tensorflow",
}


def run(command: list[str | Path], cwd: Path, patience: float = 300) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=patience)
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
    ignored = shutil.ignore_patterns(".git", ".venv*", ".setup", "bazel-*", "build", ".*_cache", "__pycache__")
    return shutil.copytree(Path(__file__).resolve().parents[2], target, ignore=ignored)


@pytest.fixture(scope="module")
def sources(tree: Path) -> Path:
    """The source distribution, unpacked."""
    with tarfile.open(build(tree, "sdist", tree.parent / "sdist")) as archive:
        archive.extractall(tree.parent, filter="data")
    (folder,) = tree.parent.glob("smp_tf-*")
    return folder


@pytest.fixture(scope="module")
def wheel(tree: Path, sources: Path) -> Path:
    """The wheel that the source distribution gives, with the ops as they were compiled from the same sources."""
    for name in COMPILED:
        shutil.copy2(tree / "ops" / name, sources / "ops" / name)
    return build(sources, "wheel", tree.parent / "wheel")


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


@pytest.fixture(scope="module")
def with_wheel(tree: Path, wheel: Path) -> Environment:
    """An environment in which the wheel is installed."""
    environment = Environment(tree.parent / "with_wheel")
    environment.install(wheel)
    return environment


def test_the_source_distribution_has_all_sources_and_nothing_compiled(tree: Path, sources: Path) -> None:
    def files(folder: Path) -> set[str]:
        """Those of the project: examples that were run may have left folders beside them."""
        found = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
        ours = {path for path in found if len(path.parts) == 1 or path.parts[0] in ALL_FOLDERS}
        return {path.as_posix() for path in ours if "__pycache__" not in path.parts}

    assert [name for name in files(sources) if name.endswith(".so")] == []
    left_out = files(tree) - files(sources) - {f"ops/{name}" for name in COMPILED}
    assert sorted(left_out) == [".gitignore", "ops/.gitignore"]


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


def test_an_installed_wheel_is_imported_from_anywhere(with_wheel: Environment, tmp_path: Path) -> None:
    site = with_wheel.site / "smp_tf"
    found = with_wheel.imported(tmp_path)
    assert Path(found["smp_tf"]).parent == site
    assert Path(found["smp_tf.ops"]).parent == site / "ops"
    assert Path(found["smp_tf.pipeline"]).parent == site / "pipeline"
    alias = "smdistributed/modelparallel/tensorflow"
    assert Path(found[alias.replace("/", ".")]).parent == with_wheel.site / alias
    load = "from smp_tf.ops.library import tf_ops_library as load; print(load().__name__)"
    assert run([with_wheel.python, "-c", load], tmp_path).strip() != ""


def test_in_the_repository_the_sources_come_first(with_wheel: Environment, tree: Path) -> None:
    found = with_wheel.imported(tree)
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
def test_a_source_distribution_compiles_and_installs(
    sources: Path, environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is built here runs no longer than it takes to import it; other flags than those of `make setup` build anew.
    monkeypatch.setenv("CXXFLAGS", "-O0 -g0")
    environment.install(build(sources, "wheel", tmp_path / "wheel"))
    found = environment.imported(tmp_path)
    assert Path(found["smp_tf.ops"]).parent == environment.site / "smp_tf" / "ops"


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_source_distribution_installs_with_its_extras_as_the_page_says(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes packages from a registry, some hundred MB."""
    monkeypatch.setenv("CXXFLAGS", "-O0 -g0")
    run([sys.executable, "-m", "venv", tmp_path / "env"], tmp_path)
    python = tmp_path / "env" / "bin" / "python"

    def install(*words: str | Path) -> None:
        run([python, "-m", "pip", "install", *words], tmp_path, patience=1500)

    built = build(sources, "sdist", tmp_path / "sdist")
    install(f"tensorflow-cpu=={version('tensorflow-cpu')}", "libucx-cu13")
    install("--no-deps", f"tf_keras=={version('tf_keras')}")
    install(f"{built}[cpu,exact]")
    script = tmp_path / "train.py"
    script.write_text(STARTED)
    assert "smp-tf plan" in run([python.with_name("smp-tf"), "plan", "--help"], tmp_path)
    assert run([python, "-c", "import smp_tf.partition.place.solve_dag, ortools; print(ortools.__name__)"], tmp_path)
    # What pip cannot install is asked for.
    trained = subprocess.run([python, script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "smp_tf needs Horovod, compiled for the TensorFlow" in trained.stderr
