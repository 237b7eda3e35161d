"""Builds smp_tf: four folders of this repository become one package, with the compiled ops inside.

folder         installed as
smp_tf/        smp_tf
ops/           smp_tf.ops        (and what ops/build.py compiles)
partition/     smp_tf.partition
pipeline/      smp_tf.pipeline
smdistributed/ smdistributed     (the drop-in alias, beside smp_tf; only its innermost folder is a package, so that
                                 other distributions may have packages of their own in `smdistributed`)

Everything declarative is in pyproject.toml.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
FOLDERS = {
    "smp_tf": "smp_tf",
    "smp_tf.ops": "ops",
    "smp_tf.partition": "partition",
    "smp_tf.pipeline": "pipeline",
    "smdistributed.modelparallel.tensorflow": "smdistributed/modelparallel/tensorflow",
}
# What ops/build.py makes: the libraries, and what they were built against.
BUILT = ("_transport.so", "_tf_ops.so", "_build.json")


def packages() -> list[str]:
    """All packages, those inside the folders included."""
    found = []
    for package, folder in FOLDERS.items():
        found.append(package)
        found += [f"{package}.{inner}" for inner in find_packages(folder)]
    return found


class BuildOps(build_ext):
    """Compiles the ops with ops/build.py, against the TensorFlow and UCX that are installed."""

    def run(self) -> None:
        """Compiles in place; copies to the build folder unless the install is editable."""
        # pip builds in an isolated environment that it announces through PYTHONPATH. The ops must
        # be compiled against the TensorFlow they will run with, which is the one outside.
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        look = "import importlib.util as u, sys; sys.exit(u.find_spec('tensorflow') is None)"
        if subprocess.run([sys.executable, "-c", look], env=env).returncode != 0:
            raise SystemExit(
                "error: smp_tf's ops are compiled against the installed TensorFlow, and "
                f"{sys.executable} has none. Install it first: "
                "pip install tensorflow-cpu libucx-cu13"
            )
        subprocess.run([sys.executable, ROOT / "ops" / "build.py"], env=env, check=True)
        if self.inplace or self.editable_mode:
            return
        for source, target in zip(self._in_place(), self.get_outputs(), strict=True):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copyfile(source, target)

    def _in_place(self) -> list[str]:
        return [str(ROOT / "ops" / name) for name in BUILT]

    def get_outputs(self) -> list[str]:
        """The files this command makes."""
        if self.inplace or self.editable_mode:
            return self._in_place()
        return [os.path.join(self.build_lib, "smp_tf", "ops", name) for name in BUILT]

    def get_output_mapping(self) -> dict[str, str]:
        """From files of the build folder to where they are in place."""
        built = [os.path.join(self.build_lib, "smp_tf", "ops", name) for name in BUILT]
        return dict(zip(built, self._in_place(), strict=True))


setup(
    packages=packages(),
    package_dir=FOLDERS,
    package_data={package: ["py.typed"] for package in ("smp_tf", "smdistributed.modelparallel.tensorflow")},
    # Says that the wheel is for one platform, and gives sdist its sources (with MANIFEST.in).
    ext_modules=[Extension("smp_tf.ops._transport", sources=[])],
    cmdclass={"build_ext": BuildOps},
)
