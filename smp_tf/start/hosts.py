"""Tells which processes are on one machine, and over what those on different ones speak."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from smp_tf.errors import EnvironmentSetupError

# Set by horovodrun: the interface over which it found that all hosts reach each other, or that it was told to take.
_INTERFACE = "HOROVOD_GLOO_IFACE"
_DEVICES = "UCX_NET_DEVICES"
# What horovodrun names where all processes are on its own host, and they may be in several containers; UCX finds no way
# from one of them to another over it.
_LOOPBACK = "lo"
# Of processes that differ in one of these the one may not see the other, or has no memory to share with it.
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
    """Returns a name that is equal on processes that can share memory, and on no others, such as other containers."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    parts = [socket.gethostname(), boot.read_text().strip() if boot.exists() else ""]
    namespaces = [Path("/proc/self/ns") / name for name in _NAMESPACES]
    return " ".join([*parts, *(str(path.stat().st_ino) for path in namespaces if path.exists())])


def network_devices(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the interface that messages between hosts go over, as the launcher says it; "" for any."""
    # Horovod speaks over it, and nothing else is to be opened to the network.
    interface = environment.get(_INTERFACE, "")
    return "" if interface == _LOOPBACK else interface


def note_on_network(single_host: bool, environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns what the user should know of the network interfaces that are opened.

    Args:
        single_host: whether none is.
        environment: the variables to look at.

    Returns:
        A sentence or two; None if only those are opened that somebody has chosen.
    """
    chosen = network_devices(environment) or environment.get(_DEVICES)
    return None if single_host or chosen else _ALL_INTERFACES


def may_read_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether ranks of one host fetch large tensors from each other's memory, where the system lets them.

    Args:
        environment: the variables to look at.

    Raises:
        EnvironmentSetupError: SMP_TF_READ_MEMORY is neither "on" nor "off".
    """
    return _is_on(_READING, environment)


def may_use_huge_pages(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether the memory that large tensors lie in is moved into huge pages, where the system has them.

    Args:
        environment: the variables to look at.

    Raises:
        EnvironmentSetupError: SMP_TF_HUGE_PAGES is neither "on" nor "off".
    """
    return _is_on(_HUGE_PAGES, environment)


def _is_on(name: str, environment: Mapping[str, str]) -> bool:
    """Returns whether a variable that is "on" where nobody sets it is so."""
    said = environment.get(name, "on")
    if said not in ("on", "off"):
        raise EnvironmentSetupError(f'{name} is "on" or "off"; received {said!r}')
    return said == "on"


def note_on_reading(tried: bool, machines: Sequence[str], rank: int, readable: Sequence[bool]) -> str | None:
    """Returns what the user should know of how large tensors go between the ranks of this host.

    Args:
        tried: whether they were to be read from the memory of their senders.
        machines: the `machine` of every rank.
        rank: this one.
        readable: of every rank, whether this one can read its memory.

    Returns:
        A sentence or two; None if there is nothing to say.
    """
    neighbours = [r for r, machine in enumerate(machines) if machine == machines[rank] and r != rank]
    return None if not tried or all(readable[r] for r in neighbours) else _NOT_READABLE
