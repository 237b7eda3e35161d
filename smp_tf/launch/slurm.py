"""The hosts that Slurm has given to a job, from the variables that it sets."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping

from smp_tf.launch.errors import LaunchError

_NODES = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
_TASKS = ("SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
_EXPANDING_TIME = 10
#: Commas that are not within brackets.
_BETWEEN_NAMES = re.compile(r",(?![^\[]*\])")
_BRACKETS = re.compile(r"\[([^\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?$")
#: Such as "4(x2)": four tasks on each of two nodes.
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?$")


def is_slurm_job(environment: Mapping[str, str]) -> bool:
    """Returns whether Slurm has given hosts to this process."""
    return any(environment.get(name) for name in _NODES)


def slurm_slots(environment: Mapping[str, str]) -> dict[str, int]:
    """Returns the tasks of each host that Slurm has given.

    Args:
        environment: the variables that Slurm sets.

    Raises:
        LaunchError: the variables cannot be read, or each task of a job step runs this launcher.
    """
    steps = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if steps.isdigit() and int(steps) > 1:
        raise LaunchError(
            f"srun has started this command {steps} times. Call `smp-tf run` once, in the batch script itself: it "
            f"starts all ranks."
        )
    variable, nodes = _first_of(_NODES, environment)
    names = _by_scontrol(nodes) or list(names_in(nodes, variable))
    counted, tasks = _first_of(_TASKS, environment)
    if not tasks:
        return dict.fromkeys(names, 1)
    counts = list(_counts_in(tasks, counted))
    if len(counts) == 1:
        counts *= len(names)
    if len(counts) != len(names):
        raise LaunchError(
            f"Slurm names {len(names)} hosts ({variable}={nodes}) and tasks of {len(counts)} ({counted}={tasks}). "
            f"Name the hosts with -H host:slots,..."
        )
    return dict(zip(names, counts, strict=True))


def names_in(nodes: str, variable: str = _NODES[0]) -> Iterator[str]:
    """Yields the hosts of one of Slurm's lists.

    Args:
        nodes: such as "gpu[01-03,7],login".
        variable: where it comes from, for messages.

    Raises:
        LaunchError: the list cannot be read.
    """
    for text in _BETWEEN_NAMES.split(nodes):
        found = list(_expanded(text.strip()))
        if not found or not all(found) or any(set(name) & set("[](), ") for name in found):
            raise LaunchError(f"{variable}={nodes} is no list of hosts. Name them with -H host:slots,...")
        yield from found


def _first_of(names: tuple[str, ...], environment: Mapping[str, str]) -> tuple[str, str]:
    """Returns the first variable that is set, and its value."""
    return next(((name, environment[name]) for name in names if environment.get(name)), (names[0], ""))


def _by_scontrol(nodes: str) -> list[str]:
    """Returns the hosts as Slurm's own command lists them; none where there is no such command, or it fails."""
    command = shutil.which("scontrol")
    if command is not None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                [command, "show", "hostnames", nodes],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                timeout=_EXPANDING_TIME,
                check=True,
            )
            return done.stdout.split()
    return []


def _expanded(text: str) -> Iterator[str]:
    """Yields the names that a name with brackets stands for."""
    brackets = _BRACKETS.search(text)
    if brackets is None:
        yield text
        return
    before, after = text[: brackets.start()], text[brackets.end() :]
    for part in brackets[1].split(","):
        numbers = _RANGE.match(part.strip())
        if numbers is None:
            return
        first, last = numbers[1], numbers[2] or numbers[1]
        for number in range(int(first), int(last) + 1):
            for rest in _expanded(after):
                yield f"{before}{number:0{len(first)}d}{rest}"


def _counts_in(tasks: str, variable: str) -> Iterator[int]:
    for part in tasks.split(","):
        found = _COUNT.match(part.strip())
        if found is None:
            raise LaunchError(f"{variable}={tasks} is no list of numbers of tasks. Name hosts with -H host:slots,...")
        yield from [int(found[1])] * int(found[2] or 1)
