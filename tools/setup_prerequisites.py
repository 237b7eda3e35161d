"""Checks what the machine must have before the set-up can start, and says how to install what is missing."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys

OLDEST_GXX = 9


class SetupFailure(Exception):  # noqa: N818 - an end, with its cause, not a bug
    """The set-up cannot go on. The text is one line: the cause, and what to do."""


def missing_debian_packages() -> dict[str, str]:
    """Finds the prerequisites that are not there.

    Returns:
        A dict from words for what is missing to the Debian package that has it.
    """
    missing = {}
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if any(importlib.util.find_spec(name) is None for name in ("venv", "ensurepip")):
        missing[f"the venv module of Python {version}"] = f"python{version}-venv"
    for program, package in (("g++", "g++"), ("make", "make")):
        if shutil.which(program) is None:
            missing[program] = package
    return missing


def compiler_version() -> str:
    """Returns the first line of `g++ --version`: names the compiler well enough to key what it built."""
    answer = subprocess.run(["g++", "--version"], stdout=subprocess.PIPE, text=True, check=True)
    return answer.stdout.splitlines()[0]


def check() -> None:
    """Checks all prerequisites.

    Raises:
        SetupFailure: something is missing or too old. The message has the command to install it.
    """
    if not sys.platform.startswith("linux"):
        raise SetupFailure(f"smp_tf runs on Linux; this is {sys.platform}")
    missing = missing_debian_packages()
    if missing:
        what, packages = " and ".join(missing), " ".join(missing.values())
        verb = "is" if len(missing) == 1 else "are"
        raise SetupFailure(f"{what} {verb} missing. Install: sudo apt-get install {packages}")
    answer = subprocess.run(["g++", "-dumpversion"], stdout=subprocess.PIPE, text=True)
    major = re.match(r"\d+", answer.stdout)
    if major is None or int(major.group()) < OLDEST_GXX:
        found = answer.stdout.strip() or "one that does not run"
        raise SetupFailure(
            f"g++ {OLDEST_GXX} or newer is needed (C++17); found {found}. Install: sudo apt-get install g++"
        )
