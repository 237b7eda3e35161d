"""Tells which processes are on one machine, and over which interfaces those on different machines speak."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from smp_tf.errors import EnvironmentSetupError

# Variable of horovodrun with the interface over which all hosts reach each other, or that the user gave to it.
_INTERFACE = "HOROVOD_GLOO_IFACE"
_DEVICES = "UCX_NET_DEVICES"
# The interface that horovodrun names where all processes are on its own host. They may be in several containers,
# between which UCX finds no way over it.
_LOOPBACK = "lo"
# Where two processes differ in one of these, one may not see the other, or they cannot share memory.
_NAMESPACES = ("pid", "ipc")

_READING = "SMP_TF_READ_MEMORY"
_HUGE_PAGES = "SMP_TF_HUGE_PAGES"

_NOT_READABLE = (
    "The system does not let the ranks of a host read each other's memory (kernel.yama.ptrace_scope, or what a "
    "container may do, forbids it): large tensors between them take two copies through shared memory instead of one. "
    f"{_READING}=off in the environment does not try."
)
_ALL_INTERFACES = (
    f"Messages between hosts may go over any network interface: the launcher has named none that leads to another "
    f"host. {_DEVICES}=eth0 in the environment names the one that is to be opened."
)


def machine() -> str:
    """Returns a name that is equal on processes that can share memory, but not on others, such as other containers."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    parts = [socket.gethostname(), boot.read_text().strip() if boot.exists() else ""]
    namespaces = [Path("/proc/self/ns") / name for name in _NAMESPACES]
    return " ".join([*parts, *(str(path.stat().st_ino) for path in namespaces if path.exists())])


def network_devices(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the launcher's interface for messages between hosts; "" for any."""
    # Horovod speaks over it. Nothing else is to be opened to the network.
    interface = environment.get(_INTERFACE, "")
    return "" if interface == _LOOPBACK else interface


def note_on_network(single_host: bool, environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns what the user should know about the network interfaces that are opened.

    Args:
        single_host: whether no interface is opened.
        environment: the variables to look at.

    Returns:
        A sentence or two; None if only interfaces are opened that somebody has chosen.
    """
    chosen = network_devices(environment) or environment.get(_DEVICES)
    return None if single_host or chosen else _ALL_INTERFACES


def may_read_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether ranks of one host may fetch large tensors from each other's memory.

    Args:
        environment: the variables to look at.

    Raises:
        EnvironmentSetupError: SMP_TF_READ_MEMORY is neither "on" nor "off".
    """
    return _is_on(_READING, environment)


def may_use_huge_pages(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether the memory of large tensors may be moved into huge pages.

    Args:
        environment: the variables to look at.

    Raises:
        EnvironmentSetupError: SMP_TF_HUGE_PAGES is neither "on" nor "off".
    """
    return _is_on(_HUGE_PAGES, environment)


def _is_on(name: str, environment: Mapping[str, str]) -> bool:
    """Returns whether a variable is "on", its default."""
    said = environment.get(name, "on")
    if said not in ("on", "off"):
        raise EnvironmentSetupError(f'{name} is "on" or "off"; received {said!r}')
    return said == "on"


def note_on_reading(tried: bool, machines: Sequence[str], rank: int, readable: Sequence[bool]) -> str | None:
    """Returns what the user should know about how large tensors travel between the ranks of this host.

    Args:
        tried: whether it was tried to read them from the memory of their senders.
        machines: every rank's `machine`.
        rank: this rank.
        readable: for every rank, whether this one can read its memory.

    Returns:
        A sentence or two; None if there is nothing to say.
    """
    neighbours = [r for r, machine in enumerate(machines) if machine == machines[rank] and r != rank]
    return None if not tried or all(readable[r] for r in neighbours) else _NOT_READABLE
