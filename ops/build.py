"""Compiles the transport library and the TensorFlow ops over it.

    cc/transport/*.cc ──▶ _transport.so   (UCX, no TensorFlow)
    cc/kernels/*.cc   ──▶ _tf_ops.so      (libtensorflow_framework and _transport.so)

A target is rebuilt when one of its sources, its flags, or its TensorFlow or UCX has changed. `_build.json` next to the
libraries says what they were built against.

Example:
    $ python ops/build.py
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
STAMP = "_build.json"
COMMON_FLAGS = ("-std=c++17", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-Wall", "-pthread")


class BuildError(RuntimeError):
    """The ops could not be built. The message says what is missing, or what the compiler said."""


@dataclass(frozen=True)
class Target:
    """A shared library or program to build.

    Attributes:
        name: File name of the result.
        sources: C++ files.
        compile_flags: Flags of every compilation.
        link_flags: Flags of the link, after the objects.
    """

    name: str
    sources: tuple[Path, ...]
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]


def ucx_folder() -> Path:
    """Returns the installed libucx package, with its `include` and `lib`.

    Raises:
        BuildError: libucx is not installed.
    """
    spec = importlib.util.find_spec("libucx")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError(
            "UCX is needed to build smp_tf's transport, but the package libucx is not installed. "
            "Run: pip install libucx-cu13"
        )
    return Path(spec.submodule_search_locations[0])


@dataclass(frozen=True)
class TensorFlowPaths:
    """The places of TensorFlow's headers and its framework library, and its version."""

    version: str
    include: Path
    library: Path
    framework: str


def tensorflow_paths() -> TensorFlowPaths:
    """Finds TensorFlow without importing it, which would cost seconds on every build.

    Raises:
        BuildError: TensorFlow is not installed, or has no headers.
    """
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError(
            "TensorFlow is needed to build smp_tf's ops, but it is not installed. Run: pip install tensorflow-cpu"
        )
    folder = Path(spec.submodule_search_locations[0])
    frameworks = sorted(folder.glob("libtensorflow_framework.so.*"))
    if not (folder / "include").is_dir() or not frameworks:
        raise BuildError(f"The TensorFlow in {folder} has no headers or no framework library.")
    return TensorFlowPaths(installed_tensorflow_version(), folder / "include", folder, frameworks[0].name)


def installed_tensorflow_version() -> str:
    """Returns the version of the installed TensorFlow distribution, under any of its names."""
    for name in ("tensorflow", "tensorflow-cpu", "tf-nightly", "tensorflow-intel"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise BuildError("TensorFlow is there, but its installation has no version metadata.")


def transport_target() -> Target:
    """Returns the TensorFlow-free transport library."""
    ucx = ucx_folder()
    return Target(
        "_transport.so",
        tuple(sorted((HERE / "cc" / "transport").glob("*.cc"))),
        (*COMMON_FLAGS, "-Wextra", f"-I{HERE / 'cc'}", f"-I{ucx / 'include'}"),
        # In an installation from a wheel libucx lies next to smp_tf. Elsewhere it is loaded first.
        (
            "-shared",
            "-pthread",
            "-Wl,-soname,_transport.so",
            f"-L{ucx / 'lib'}",
            "-lucp",
            "-lucs",
            "-Wl,-rpath,$ORIGIN/../../libucx/lib",
        ),
    )


def program_target(source: Path, own: Sequence[str]) -> Target:
    """Returns a program over the built transport library, with no TensorFlow in it.

    Args:
        source: Its C++ file.
        own: Files of the library that become part of the program as well, for what the library does not export.
    """
    transport = transport_target()
    library = HERE / transport.name
    ucx = ucx_folder() / "lib"
    return Target(
        source.stem,
        (source, *(HERE / "cc" / "transport" / name for name in own)),
        (*transport.compile_flags, f"-I{source.parent}"),
        (
            # This program loads UCX first, so that it is there for the library.
            "-Wl,--no-as-needed,--disable-new-dtags",
            str(library),
            f"-Wl,-rpath,{library.parent}",
            f"-L{ucx}",
            "-lucp",
            "-lucs",
            f"-Wl,-rpath,{ucx}",
            "-pthread",
        ),
    )


def ops_target(tensorflow: TensorFlowPaths, folder: Path) -> Target:
    """Returns the TensorFlow ops over the transport library in `folder`."""
    return Target(
        "_tf_ops.so",
        tuple(sorted((HERE / "cc" / "kernels").glob("*.cc"))),
        (
            *COMMON_FLAGS,
            "-DNDEBUG",
            "-D_GLIBCXX_USE_CXX11_ABI=1",
            "-DEIGEN_MAX_ALIGN_BYTES=64",
            f"-I{HERE / 'cc'}",
            f"-isystem{tensorflow.include}",
        ),
        (
            "-shared",
            "-pthread",
            f"-L{folder}",
            "-l:_transport.so",
            f"-L{tensorflow.library}",
            f"-l:{tensorflow.framework}",
            "-Wl,-rpath,$ORIGIN",
            "-Wl,--allow-shlib-undefined",
        ),
    )


def build_ops(folder: Path | str | None = None, *, verbose: bool = True) -> list[Path]:
    """Builds the two libraries where they are out of date.

    Args:
        folder: Where the libraries and the stamp go; this folder by default.
        verbose: Whether to say on stdout what is being compiled.

    Returns:
        The two libraries and the stamp.

    Raises:
        BuildError: A prerequisite is missing, or the compiler refused.
    """
    folder = Path(folder) if folder is not None else HERE
    folder.mkdir(parents=True, exist_ok=True)
    tensorflow = tensorflow_paths()
    stamp_path = folder / STAMP
    stamp = _read_stamp(stamp_path)
    built = False
    for target in (transport_target(), ops_target(tensorflow, folder)):
        fingerprint = _fingerprint(target, tensorflow.version)
        if stamp.get(target.name) == fingerprint and (folder / target.name).exists():
            continue
        build_target(target, folder, verbose=verbose)
        stamp[target.name] = fingerprint
        built = True
    if built or stamp.get("tensorflow") != tensorflow.version:
        stamp["tensorflow"] = tensorflow.version
        stamp["ucx"] = _ucx_version()
        _replace(stamp_path, json.dumps(stamp, indent=1).encode())
    return [folder / "_transport.so", folder / "_tf_ops.so", stamp_path]


def build_target(target: Target, folder: Path, *, verbose: bool = True) -> Path:
    """Compiles and links one target into `folder`, and replaces an old one in one piece.

    Raises:
        BuildError: The compiler or the linker refused.
    """
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    with tempfile.TemporaryDirectory(prefix="smp_tf_build_") as scratch:

        def compile_one(source: Path) -> str:
            if verbose:
                print(f"compiling {source.name}", flush=True)
            result = str(Path(scratch) / f"{source.stem}.o")
            _run([*compiler, *_flags(target), "-c", str(source), "-o", result])
            return result

        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            objects = list(pool.map(compile_one, target.sources))
        if verbose:
            print(f"linking {target.name}", flush=True)
        result = folder / target.name
        unfinished = folder / f".{target.name}.{os.getpid()}"
        try:
            _run([*compiler, *objects, *target.link_flags, "-o", str(unfinished)])
            os.replace(unfinished, result)
        finally:
            unfinished.unlink(missing_ok=True)
    return result


def _flags(target: Target) -> list[str]:
    """Returns the compiler's flags. The environment's CXXFLAGS come last, so that they win."""
    return [*target.compile_flags, *shlex.split(os.environ.get("CXXFLAGS", ""))]


def _run(command: Sequence[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise BuildError(
            f"The C++ compiler {command[0]!r} was not found. Run: apt install g++ (or set CXX)."
        ) from error
    if result.returncode != 0:
        raise BuildError(f"{shlex.join(command)} failed:\n{result.stderr}")


def _ucx_version() -> str:
    version = ucx_folder() / "VERSION.txt"
    if version.exists():
        return version.read_text().strip()
    for name in ("libucx-cu13", "libucx-cu12"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def _fingerprint(target: Target, tensorflow_version: str) -> str:
    digest = hashlib.sha256()
    flags = json.dumps([_flags(target), target.link_flags, os.environ.get("CXX", "g++")])
    # Libraries that were moved or copied with their sources stay valid.
    digest.update(flags.replace(str(HERE), ".").encode())
    if target.name == "_tf_ops.so":
        digest.update(tensorflow_version.encode())
    digest.update(_ucx_version().encode())
    for path in sorted((*target.sources, *(HERE / "cc").rglob("*.h"))):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _read_stamp(path: Path) -> dict[str, str]:
    try:
        stamp = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def _replace(path: Path, content: bytes) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)


def main() -> int:
    """Builds from the command line."""
    parser = argparse.ArgumentParser(description="Build smp_tf's transport and TensorFlow ops.")
    parser.add_argument("--output", type=Path, default=HERE, help="folder for the libraries")
    parser.add_argument("--quiet", action="store_true", help="say nothing when all goes well")
    arguments = parser.parse_args()
    try:
        build_ops(arguments.output, verbose=not arguments.quiet)
    except BuildError as error:
        print(f"ops/build.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
