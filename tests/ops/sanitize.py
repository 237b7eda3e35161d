"""Runs the transport's C++ tests under the compiler's sanitizers: `make sanitize`.

    cc/*_test.cc ─┐
                  ├─▶ objects, kept in build/sanitize ─▶ program ─▶ its output, with what a sanitizer saw
    ops/cc/transport/*.cc ─┘

AddressSanitizer finds uses of freed memory and leaks, UndefinedBehaviorSanitizer what C++ leaves undefined,
ThreadSanitizer races. UCX itself is as it was installed: what happens in it nobody looks at.

Example:
    $ python -m tests.ops.sanitize
    $ python -m tests.ops.sanitize --only thread storm_test
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from smp_tf.ops import build

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "ops" / "cc"
TRANSPORT = ROOT / "ops" / "cc" / "transport"
OBJECTS = ROOT / "build" / "sanitize"
SUPPRESSIONS = TESTS / "sanitizer_suppressions"
# What a report of any of them begins with.
REPORT = re.compile(r"(ERROR|WARNING|SUMMARY): \w+Sanitizer|runtime error: |FATAL: \w+Sanitizer")
#: Of the storm, of which more find more.
STORM_ROUNDS = 30
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Sanitizer:
    """One way to compile the tests.

    Attributes:
        name: Its name here.
        words: Its names, in an error.
        flags: What the compiler is given.
    """

    name: str
    words: str
    flags: tuple[str, ...]


SANITIZERS = {
    "address": Sanitizer(
        "address",
        "AddressSanitizer and UndefinedBehaviorSanitizer",
        ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"),
    ),
    "thread": Sanitizer("thread", "ThreadSanitizer", ("-fsanitize=thread",)),
}


class MissingSanitizerError(RuntimeError):
    """The compiler, or the system, has no such sanitizer; the message says what to do."""


def all_tests() -> list[str]:
    """Names of the C++ tests."""
    return sorted(path.stem for path in TESTS.glob("*_test.cc"))


def check(sanitizer: Sanitizer) -> None:
    """Compiles and runs a program of one line.

    Raises:
        MissingSanitizerError: That does not work.
    """
    with tempfile.TemporaryDirectory(prefix="smp_tf_sanitize_") as scratch:
        source = Path(scratch) / "nothing.cc"
        source.write_text("int main() { return 0; }\n")
        program = source.with_suffix("")
        for command in (
            [*_compiler(), *sanitizer.flags, str(source), "-o", str(program)],
            [*_runner(sanitizer), str(program)],
        ):
            result = _run(command)
            if result.returncode != 0:
                raise MissingSanitizerError(
                    f"{sanitizer.words}: not there. {shlex.join(command)} gave:\n{result.stdout}{result.stderr}\n"
                    "Run: apt install g++ (which has them all), or set CXX to a compiler that has."
                )


def whole_program(test: str, sanitizer: Sanitizer) -> Path:
    """Compiles a test with all of the transport's sources, where they have changed."""
    target = build.transport_target()
    flags = (*target.compile_flags, "-O1", *sanitizer.flags, f"-I{TESTS}")
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        objects = list(
            pool.map(lambda source: _object(source, flags, sanitizer), (TESTS / f"{test}.cc", *target.sources))
        )
    libraries = build.ucx_folder() / "lib"
    program = OBJECTS / sanitizer.name / test
    _make(
        (
            *(*_compiler(), *sanitizer.flags, "-pthread", *map(str, objects)),
            *(f"-L{libraries}", "-lucp", "-lucs", f"-Wl,-rpath,{libraries}", "-o"),
        ),
        program,
    )
    return program


def program_over_library(test: str, sanitizer: Sanitizer) -> Path:
    """Compiles a test alone, over the built library: cheap, and sees what the test's own memory goes through."""
    target = build.program_target(TESTS / f"{test}.cc", [])
    source = _object(target.sources[0], (*target.compile_flags, "-O1", *sanitizer.flags), sanitizer)
    program = OBJECTS / sanitizer.name / f"{test}_over_library"
    _make([*_compiler(), *sanitizer.flags, str(source), *target.link_flags, "-o"], program)
    return program


def report_of(
    program: Path, sanitizer: Sanitizer, arguments: Sequence[str] = (), timeout: float = TIMEOUT_S
) -> str | None:
    """Runs a program.

    Args:
        program: What `whole_program` has made.
        sanitizer: Which it was made with.
        arguments: Of the program.
        timeout: Seconds after which it counts as hung.

    Returns:
        What went wrong, or None.
    """
    environment = {**os.environ, "UCX_LOG_LEVEL": "error", "UCX_HANDLE_ERRORS": "none", "UCX_MEM_EVENTS": "n"}
    environment["ASAN_OPTIONS"] = "detect_leaks=1:abort_on_error=0"
    environment["LSAN_OPTIONS"] = f"suppressions={SUPPRESSIONS / 'leak.txt'}:print_suppressions=0"
    environment["UBSAN_OPTIONS"] = "print_stacktrace=1"
    # What a process reads of another one's memory, the sanitizers' own code (of gcc 12) looks for in this one's.
    environment["UCX_TLS"] = "posix,self"
    environment["TSAN_OPTIONS"] = f"suppressions={SUPPRESSIONS / 'thread.txt'}:halt_on_error=1:second_deadlock_stack=1"
    command = [*_runner(sanitizer), str(program), *arguments]
    try:
        result = _run(command, environment, timeout)
    except subprocess.TimeoutExpired as error:
        return f"{program.name} was not done after {timeout} s:\n{error.stdout!r}\n{error.stderr!r}"
    output = result.stdout + result.stderr
    if result.returncode != 0 or REPORT.search(output):
        return f"{shlex.join(command)} ended with {result.returncode}:\n{output}"
    return None


def arguments_of(test: str) -> list[str]:
    """What a test is given in the long form."""
    return {"storm_test": [str(STORM_ROUNDS)], "transport_test": ["small"]}.get(test, [])


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "g++"))


def _runner(sanitizer: Sanitizer) -> list[str]:
    """ThreadSanitizer of gcc 12 knows no memory as scattered as newer kernels have it."""
    setarch = shutil.which("setarch")
    return [setarch, "-R"] if sanitizer.name == "thread" and setarch and _may_place_memory(setarch) else []


def _may_place_memory(setarch: str) -> bool:
    return subprocess.run([setarch, "-R", "true"], capture_output=True, check=False).returncode == 0


def _run(
    command: Sequence[str], environment: dict[str, str] | None = None, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, env=environment, timeout=timeout
        )
    except FileNotFoundError as error:
        raise MissingSanitizerError(f"{command[0]!r} was not found. Run: apt install g++ (or set CXX).") from error


def _object(source: Path, flags: Sequence[str], sanitizer: Sanitizer) -> Path:
    """Compiles a file, unless there is an object of the same sources and flags."""
    digest = hashlib.sha256(repr((_compiler(), flags)).encode())
    for path in sorted((source, *TRANSPORT.glob("*.h"), *source.parent.glob("*.h"))):
        digest.update(path.name.encode() + path.read_bytes())
    result = OBJECTS / sanitizer.name / f"{source.stem}-{digest.hexdigest()[:16]}.o"
    if not result.exists():
        for outdated in result.parent.glob(f"{source.stem}-{'[0-9a-f]' * 16}.o"):
            outdated.unlink(missing_ok=True)
        _make([*_compiler(), *flags, "-c", str(source), "-o"], result)
    return result


def _make(command: Sequence[str], result: Path) -> None:
    """Runs a command that writes a file, which is there in one piece."""
    result.parent.mkdir(parents=True, exist_ok=True)
    unfinished = result.with_name(f".{result.name}.{os.getpid()}")
    made = _run([*command, str(unfinished)])
    if made.returncode != 0:
        raise build.BuildError(f"{shlex.join(command)} failed:\n{made.stderr}")
    os.replace(unfinished, result)


def main() -> int:
    """Runs tests from the command line."""
    parser = argparse.ArgumentParser(description="Run the transport's C++ tests under sanitizers.")
    parser.add_argument("tests", nargs="*", help=f"of {', '.join(all_tests())}; all of them by default")
    parser.add_argument("--only", choices=sorted(SANITIZERS), help="one sanitizer; both kinds by default")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.tests) - set(all_tests()))
    if unknown:
        parser.error(f"There are the tests {', '.join(all_tests())}. Received: {', '.join(unknown)}")
    failed = False
    for name, sanitizer in SANITIZERS.items():
        if arguments.only not in (None, name):
            continue
        try:
            check(sanitizer)
        except MissingSanitizerError as error:
            print(error, file=sys.stderr)
            failed = True
            continue
        for test in arguments.tests or all_tests():
            begun = time.monotonic()
            try:
                report = report_of(whole_program(test, sanitizer), sanitizer, arguments_of(test))
            except build.BuildError as error:
                report = str(error)
            print(f"{name} {test}: {report or f'ok, {time.monotonic() - begun:.0f} s'}", flush=True)
            failed = failed or report is not None
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
