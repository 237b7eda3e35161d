"""Tells who started this process, and whether Horovod agrees about the number of processes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from smp_tf.errors import LauncherError

# Variable that holds the number of processes -> the launcher that sets it. Slurm's counts the tasks of the whole job.
_WORLD_VARIABLES = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "PMI_SIZE": "an MPI launcher (PMI)",
    "SLURM_NTASKS": "Slurm",
}
_HOROVODRUN = "HOROVOD_RANK"


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether a launcher started this process, rather than plain `python`."""
    return _HOROVODRUN in environment or any(name in environment for name in _WORLD_VARIABLES)


def check_world(world_size: int, built_with: str, environment: Mapping[str, str] = os.environ) -> None:
    """Refuses N worlds of one process each where a launcher made one world of N.

    Args:
        world_size: The number of processes Horovod sees.
        built_with: Words for what Horovod was built with, such as "Gloo".
        environment: The variables to look at.

    Raises:
        LauncherError: A launcher says there are more processes than Horovod sees.
    """
    if world_size > 1 or _HOROVODRUN in environment:
        return
    for name, launcher in _WORLD_VARIABLES.items():
        value = environment.get(name, "")
        if value.isdigit() and int(value) > 1:
            raise LauncherError(
                f"{launcher} started {value} processes ({name}={value}), but Horovod sees only "
                f"this one: each would train the whole model alone. This Horovod was built with "
                f"{built_with}. Start with `horovodrun -np {value} python <script>`, or build "
                f"Horovod with MPI (HOROVOD_WITH_MPI=1). If one process is what you want, unset "
                f"{name}."
            )
