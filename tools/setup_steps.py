"""The set-up's steps, in order. Each is done once, and again when what it depends on has changed.

    environment ──▶ horovod ──▶ ops ──▶ smp_tf
    .venv with       compiled    ops/*.so  editable install
    pinned packages  or cached

A step's stamp is written when all of it is done, so a set-up can be stopped at any moment and repeated. Inside the
environment a half-done install is never trusted. `environment` starts from nothing, and the later steps first remove
what they have put there.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import setup_prerequisites
import setup_versions
from setup_engine import Engine, Step
from setup_prerequisites import SetupFailure
from setup_progress import Progress
from setup_state import digest

ROOT = Path(__file__).resolve().parent.parent
HEADERS = ROOT / "tools" / "horovod_headers"
FORWARDED_HEADER = HEADERS / "tensorflow/compiler/xla/client/xla_builder.h"
STATE = ROOT / ".setup"
OPS_OUTPUTS = ("_transport.so", "_tf_ops.so", "_build.json")
INTERRUPTED = 130
# Not sys.executable. While the environment is active, that is inside what will be replaced.
BASE_PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))


class Setup:
    """Sets up one environment."""

    def __init__(self, tensorflow: str, venv: Path) -> None:
        """Args: tensorflow: `current` or `oldest`. venv: the environment's folder."""
        self.tensorflow = tensorflow
        self.venv = venv
        self.python = venv / "bin" / "python"
        self.requirements = setup_versions.requirements(tensorflow)
        self.tensorflow_version = setup_versions.pinned(f"tensorflow {tensorflow}", "tensorflow-cpu")
        self.horovod_version = setup_versions.pinned("horovod", "horovod")
        self.engine = Engine(venv.name, STATE, venv / ".setup")

    def steps(self) -> list[Step]:
        """Returns the steps with their present keys. Each key contains the one before it."""
        compiler = setup_prerequisites.compiler_version()
        environment = digest(sys.version, BASE_PYTHON, str(self.venv), *self.requirements)
        horovod = digest(environment, self._horovod_key(compiler))
        sources = sorted((ROOT / "ops").glob("**/*.cc")) + sorted((ROOT / "ops").glob("**/*.h"))
        ops = digest(environment, compiler, ROOT / "ops" / "build.py", *sources)
        package = digest(environment, ROOT / "setup.py", ROOT / "pyproject.toml")
        return [
            Step(
                "environment",
                f"install TensorFlow {self.tensorflow_version} and what goes with it in "
                f"{self.venv.name} (Python {platform.python_version()})",
                environment,
                self._make_environment,
                self.python.exists,
            ),
            Step("horovod", f"Horovod {self.horovod_version}", horovod, self._install_horovod),
            Step("ops", "compile the C++ ops", ops, self._compile_ops, self._ops_are_there),
            Step("smp_tf", "install smp_tf (editable)", package, self._install_smp_tf),
        ]

    def run(self) -> None:
        """Does what is not done yet.

        Raises:
            SetupFailure: a step failed. The message is the cause in one line.
        """
        setup_prerequisites.check()
        self.engine.run(self.steps())

    def _child_env(self, **settings: str) -> dict[str, str]:
        """Returns the caller's environment with ours first, and without variables that mislead pip or make."""
        astray = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_USER", "MFLAGS", "MAKELEVEL")
        env = {name: value for name, value in os.environ.items() if name not in astray}
        env["VIRTUAL_ENV"] = str(self.venv)
        env["PATH"] = f"{self.venv / 'bin'}{os.pathsep}{env.get('PATH', os.defpath)}"
        env["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
        return env | settings

    def _pip(self, progress: Progress, *arguments: str | Path, **settings: str) -> None:
        command = [self.python, "-m", "pip", "--no-input", *arguments]
        progress.run(command, self._child_env(**settings), ROOT)

    def _site_packages(self) -> Path:
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        return self.venv / "lib" / version / "site-packages"

    def _make_environment(self, progress: Progress) -> None:
        if self.venv.exists():
            if not (self.venv / ".setup").is_dir() and any(self.venv.iterdir()):
                raise SetupFailure(
                    f"{self.venv} was not made by this set-up, so it is left alone. "
                    f"Move it away: mv {self.venv.name} {self.venv.name}.mine"
                )
            self.venv.rename(self.engine.trash)
            shutil.rmtree(self.engine.trash)
        newborn = STATE / f"{self.venv.name}.new"
        shutil.rmtree(newborn, ignore_errors=True)
        (newborn / ".setup").mkdir(parents=True)
        newborn.rename(self.venv)
        progress.run([BASE_PYTHON, "-m", "venv", self.venv], self._child_env(), ROOT)
        self._pip(progress, "install", *setup_versions.read_sections()["pip"])
        lock = self.venv / ".setup" / "requirements.txt"
        lock.write_text("\n".join(self.requirements) + "\n")
        self._pip(progress, "install", "--no-deps", "-r", lock)

    def _horovod_settings(self) -> dict[str, str]:
        mpi = "HOROVOD_WITH_MPI" if shutil.which("mpicxx") else "HOROVOD_WITHOUT_MPI"
        return {
            "HOROVOD_WITH_TENSORFLOW": "1",
            "HOROVOD_WITH_GLOO": "1",
            mpi: "1",
            "HOROVOD_WITHOUT_PYTORCH": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        }

    def _horovod_key(self, compiler: str) -> str:
        """Returns the key of a compiled Horovod in the cache, made of all that it depends on."""
        mpi = ""
        if shutil.which("mpicxx"):
            answer = subprocess.run(["mpicxx", "-show"], stdout=subprocess.PIPE, text=True)
            mpi = answer.stdout
        return digest(
            self.horovod_version,
            self.tensorflow_version,
            f"{sys.implementation.cache_tag} {platform.machine()} {platform.libc_ver()}",
            compiler,
            mpi,
            *(f"{name}={value}" for name, value in self._horovod_settings().items()),
            FORWARDED_HEADER,
        )[:24]

    def _horovod_cache(self) -> Path:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        key = self._horovod_key(setup_prerequisites.compiler_version())
        return home / "smp_tf" / "wheels" / key

    def _install_horovod(self, progress: Progress) -> None:
        cache = self._horovod_cache()
        cached = sorted(cache.glob("horovod-*.whl"))
        if cached:
            progress.say(f"  Horovod was compiled before for this TensorFlow: {cached[0]}")
            try:
                self._install_horovod_wheel(progress, cached[0])
                return
            except SetupFailure as failure:
                progress.say(f"  the cached Horovod does not work ({failure}): compiling again")
                shutil.rmtree(cache)
        self._install_horovod_wheel(progress, self._compile_horovod(progress, cache))

    def _compile_horovod(self, progress: Progress, cache: Path) -> Path:
        """Compiles Horovod's wheel and puts it in the cache, whole or not at all."""
        include = self._site_packages() / "tensorflow" / "include"
        # TensorFlow ships these headers, but its own include flags do not name their folders.
        external = include / "external"
        folders = [HEADERS, external / "highwayhash", external / "farmhash_archive" / "src"]
        settings = self._horovod_settings()
        settings["CPLUS_INCLUDE_PATH"] = os.pathsep.join(map(str, folders))
        cores = len(os.sched_getaffinity(0))
        jobs = os.environ.get("MAKEFLAGS", "")
        settings["MAKEFLAGS"] = jobs if jobs.startswith("-j") else f"-j{cores}"
        built = STATE / f"{self.venv.name}.wheel"
        shutil.rmtree(built, ignore_errors=True)
        # pip's own cache does not know which TensorFlow a wheel was compiled against.
        self._pip(
            progress,
            *("wheel", "-v", "--no-build-isolation", "--no-deps", "--no-cache-dir"),
            *("--no-binary", "horovod", "--wheel-dir", built),
            *setup_versions.read_sections()["horovod"],
            **settings,
        )
        wheel = next(built.glob("horovod-*.whl"))
        try:
            cache.mkdir(parents=True, exist_ok=True)
            unfinished = cache / f".{wheel.name}.{os.getpid()}"
            shutil.copyfile(wheel, unfinished)
            unfinished.rename(cache / wheel.name)
        except OSError as error:
            progress.say(f"  the compiled Horovod could not be kept for the next set-up: {error}")
        return wheel

    def _install_horovod_wheel(self, progress: Progress, wheel: Path) -> None:
        for leftover in self._site_packages().glob("horovod*"):
            shutil.rmtree(leftover)
        self._pip(progress, "install", "--no-deps", "--no-index", wheel)
        check = "import horovod.tensorflow as hvd; hvd.init(); assert hvd.size() == 1"
        progress.run([self.python, "-c", check], self._child_env(TF_USE_LEGACY_KERAS="1"), ROOT)

    def _ops_are_there(self) -> bool:
        return all((ROOT / "ops" / name).exists() for name in OPS_OUTPUTS)

    def _compile_ops(self, progress: Progress) -> None:
        progress.run([self.python, ROOT / "ops" / "build.py"], self._child_env(), ROOT)

    def _install_smp_tf(self, progress: Progress) -> None:
        for leftover in self._site_packages().glob("*smp_tf*"):
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()
        self._pip(progress, "install", "--no-deps", "--no-build-isolation", "--editable", ROOT)


def main(arguments: list[str]) -> int:
    """Runs the set-up and returns the exit status."""
    parser = argparse.ArgumentParser(description="Sets up everything smp_tf needs.")
    parser.add_argument("--tensorflow", choices=("current", "oldest"), default="current")
    parser.add_argument("--venv", type=Path, help="the environment (default: .venv, .venv-oldest)")
    options = parser.parse_args(arguments)
    default = ROOT / (".venv" if options.tensorflow == "current" else ".venv-oldest")
    setup = None
    # A closed terminal and a plain `kill` end the set-up with its children, as Ctrl-C does.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        setup = Setup(options.tensorflow, (options.venv or default).absolute())
        setup.run()
    except KeyboardInterrupt:
        print("\nset-up interrupted; run it again and it goes on where it stopped", file=sys.stderr)
        return INTERRUPTED
    except (SetupFailure, OSError, ValueError) as failure:
        where = f"\nThe log is {os.path.relpath(setup.engine.log)}" if setup and setup.engine.log.exists() else ""
        print(f"\nset-up failed: {failure}{where}", file=sys.stderr)
        return 1
    return 0
