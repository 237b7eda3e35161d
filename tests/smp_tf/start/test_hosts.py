"""Which processes are taken to be on one machine, and which network interfaces are opened between hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from smp_tf.errors import EnvironmentSetupError
from smp_tf.start import hosts

ROOT = Path(__file__).resolve().parents[3]


def machine_of(*before: str) -> str:
    """What a process says that is started so; skips where this machine does not let it."""
    code = "from smp_tf.start import hosts; print(hosts.machine())"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*before, sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    if before and done.returncode != 0:
        pytest.skip(f"{' '.join(before)} does not work here: {done.stderr.strip()}")
    return done.stdout.strip()


def test_processes_of_one_machine_say_the_same() -> None:
    assert machine_of() == hosts.machine()


@pytest.mark.parametrize(
    "kinds", [["--ipc"], ["--pid", "--fork", "--mount-proc"]], ids=["shared memory", "process ids"]
)
def test_a_container_with_its_hosts_name_is_a_machine_of_its_own(kinds: list[str]) -> None:
    assert machine_of("unshare", *kinds) != hosts.machine()


def test_the_launchers_interface_is_the_one_that_is_opened() -> None:
    assert hosts.network_devices({"HOROVOD_GLOO_IFACE": "eth1"}) == "eth1"
    assert hosts.note_on_network(False, {"HOROVOD_GLOO_IFACE": "eth1"}) is None


@pytest.mark.parametrize("environment", [{}, {"HOROVOD_GLOO_IFACE": "lo"}], ids=["mpirun", "containers of one host"])
def test_it_is_said_when_no_interface_was_chosen(environment: dict[str, str]) -> None:
    assert hosts.network_devices(environment) == ""
    assert hosts.note_on_network(False, environment) == (
        "Messages between hosts may go over any network interface: the launcher has named none that leads to another "
        "host. UCX_NET_DEVICES=eth0 in the environment names the one that is to be opened."
    )


def test_nothing_is_said_where_the_user_has_chosen_or_nothing_is_opened() -> None:
    assert hosts.note_on_network(False, {"UCX_NET_DEVICES": "mlx5_0:1"}) is None
    assert hosts.note_on_network(True, {}) is None


def test_ranks_read_each_others_memory_unless_told_not_to() -> None:
    assert hosts.may_read_memory({})
    assert hosts.may_read_memory({"SMP_TF_READ_MEMORY": "on"})
    assert not hosts.may_read_memory({"SMP_TF_READ_MEMORY": "off"})
    with pytest.raises(EnvironmentSetupError, match='SMP_TF_READ_MEMORY is "on" or "off"; received \'0\''):
        hosts.may_read_memory({"SMP_TF_READ_MEMORY": "0"})


def test_large_tensors_lie_in_huge_pages_unless_told_not_to() -> None:
    assert hosts.may_use_huge_pages({})
    assert not hosts.may_use_huge_pages({"SMP_TF_HUGE_PAGES": "off"})
    with pytest.raises(EnvironmentSetupError, match='SMP_TF_HUGE_PAGES is "on" or "off"; received \'never\''):
        hosts.may_use_huge_pages({"SMP_TF_HUGE_PAGES": "never"})


def test_it_is_said_when_the_system_denies_reading_and_only_then() -> None:
    """Ranks 0 and 1 are on one host, rank 2 is alone on another, whose memory nobody is to read."""
    machines = ["a", "a", "b"]
    assert hosts.note_on_reading(True, machines, 0, [True, True, False]) is None
    assert hosts.note_on_reading(True, machines, 2, [False, False, False]) is None
    assert hosts.note_on_reading(False, machines, 0, [False, False, False]) is None
    note = hosts.note_on_reading(True, machines, 0, [True, False, False])
    assert note is not None
    assert note.startswith("The system does not let the ranks of a host read each other's memory")
    assert "SMP_TF_READ_MEMORY=off" in note
