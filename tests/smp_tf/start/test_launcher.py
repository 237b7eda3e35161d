"""A launcher that started more processes than Horovod sees."""

import pytest

from smp_tf.errors import LauncherError
from smp_tf.start.launcher import check_world, is_launched


@pytest.mark.parametrize(
    ("variable", "launcher"),
    [
        ("OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"),
        ("PMI_SIZE", "an MPI launcher"),
        ("SLURM_NTASKS", "Slurm"),
    ],
)
def test_n_worlds_of_one(variable, launcher):
    with pytest.raises(LauncherError) as raised:
        check_world(1, "Gloo", {variable: "4"})
    message = str(raised.value)
    assert launcher in message
    assert f"{variable}=4" in message
    assert "built with Gloo" in message
    assert "horovodrun -np 4" in message


def test_what_is_fine():
    check_world(1, "Gloo", {})
    check_world(1, "Gloo", {"SLURM_NTASKS": "1"})
    check_world(4, "Gloo", {"SLURM_NTASKS": "4"})
    # horovodrun -np 1 inside a Slurm job.
    check_world(1, "Gloo", {"SLURM_NTASKS": "4", "HOROVOD_RANK": "0"})


def test_is_launched():
    assert is_launched({"HOROVOD_RANK": "0"})
    assert is_launched({"PMI_SIZE": "1"})
    assert not is_launched({"PATH": "/bin"})
