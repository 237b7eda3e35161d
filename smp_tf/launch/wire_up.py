"""What Horovod's ranks need to meet: numbers, a store on this host, an interface. It is made by Horovod's own parts.

`horovodrun` would import TensorFlow twice first, to see what Horovod was built with. These parts import neither.
"""

from __future__ import annotations

import itertools
import os
import shlex
import socket
import socketserver
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from horovod.runner.common.util.env import is_exportable
from horovod.runner.common.util.hosts import HostInfo, SlotInfo, get_host_assignments
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
from horovod.runner.util import network
from horovod.runner.util.remote import get_remote_command

from smp_tf.launch.errors import LaunchError
from smp_tf.launch.host_list import THIS_HOST, HostList

#: Variables with the network interface over which Horovod's ranks speak.
INTERFACE_VARIABLES = ("HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME")
_LOOPBACK = "127.0.0.1"
_ANY_PORT = 9
#: Seconds in which a host must take a connection of ssh.
_CONNECTING_TIME = 10
#: Seconds between two looks whether the store is to be closed.
_LOOKING_TIME = 0.1


@dataclass(frozen=True)
class HostRanks:
    """The ranks of one host.

    Args:
        name: of the host, as the user gave it.
        is_here: whether it is this one.
        slots: the ranks.
        peer: another host of the job, to which this one must find a way; None where there is none.
        address: of this launcher, as that host reaches it.
    """

    name: str
    is_here: bool
    slots: tuple[SlotInfo, ...]
    peer: str | None
    address: str


def assign(hosts: HostList) -> list[HostRanks]:
    """Returns the ranks of each host that has some, host by host, and how the hosts reach each other.

    Args:
        hosts: the hosts.

    Raises:
        LaunchError: a host has no address.
    """
    given = [HostInfo(name, slots) for name, slots in hosts.slots.items()]
    slots: list[SlotInfo] = get_host_assignments(given, hosts.size, hosts.size)
    of_hosts = {name: tuple(of) for name, of in itertools.groupby(slots, lambda slot: slot.hostname)}
    here = {name: is_here(name) for name in of_hosts}
    if all(here.values()):
        return [HostRanks(name, True, of, None, _LOOPBACK) for name, of in of_hosts.items()]
    names = list(of_hosts)
    away = next(name for name in names if not here[name])
    found = []
    for name, of in of_hosts.items():
        address = address_towards(away if here[name] else name)
        # Each finds its interface on the way to the first host, and that one to the second.
        peer = names[1 if name == names[0] else 0] if len(names) > 1 else address
        found.append(HostRanks(name, here[name], of, peer, address))
    return found


def name_of(host: str) -> str:
    """Returns the name of a host for people: for "localhost" the one that smp_tf's messages have."""
    return socket.gethostname() if host == THIS_HOST else host


def is_here(host: str) -> bool:
    """Returns whether a name or an address is this host's.

    Raises:
        LaunchError: it has no address.
    """
    if host in (THIS_HOST, socket.gethostname()):
        return True
    address = network.resolve_host_address(host)
    if address is None:
        raise LaunchError(
            f"Host {host!r} has no address that this host knows. Look at the name (`getent hosts {host}`), or give its "
            f"address instead."
        )
    return address.startswith("127.") or address in network.get_local_host_addresses()


def address_towards(host: str) -> str:
    """Returns the address of this host on its way to another one.

    Args:
        host: name or address of the other host.

    Raises:
        LaunchError: there is no way.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        try:
            # Nothing is sent. The system only looks for the way.
            trial.connect((host, _ANY_PORT))
        except OSError as error:
            raise LaunchError(f"There is no way from this host to host {host!r}: {error.strerror}.") from error
        return str(trial.getsockname()[0])


def loopback() -> str:
    """Returns the name of the interface over which processes of one host speak."""
    return str(next(iter(sorted(network.get_local_intfs())), "lo"))


@contextmanager
def open_store(hosts: Sequence[HostRanks]) -> Iterator[Store]:
    """Opens the store in which ranks leave their addresses, within a context.

    Args:
        hosts: the hosts of the job. The store can be reached by these alone where one address leads to it.
    """
    addresses = {host.address for host in hosts}
    server = Store((addresses.pop() if len(addresses) == 1 else "", 0), RendezvousHandler, 0)
    thread = threading.Thread(target=server.serve_forever, args=(_LOOKING_TIME,), name="smp-tf store", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Store(RendezvousHTTPServer):
    """Horovod's store, on one address, with a port that the system chooses."""

    daemon_threads = True
    request_queue_size = 128

    def server_bind(self) -> None:
        """Takes an address and a port. It asks nobody for the name of the address, which can take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]

    def forget(self, hosts: Sequence[HostRanks]) -> None:
        """Drops what ranks have left, before others start."""
        self.init([slot for host in hosts for slot in host.slots])


def variables_of_job(host: HostRanks, port: int) -> dict[str, str]:
    """Returns the variables that all ranks of a host need, without the interface.

    Args:
        host: the host.
        port: of the store.
    """
    return {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": host.address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }


def variables_of_rank(slot: SlotInfo) -> dict[str, str]:
    """Returns the variables with a rank's numbers."""
    return {
        "HOROVOD_HOSTNAME": str(slot.hostname),
        "HOROVOD_RANK": str(slot.rank),
        "HOROVOD_SIZE": str(slot.size),
        "HOROVOD_LOCAL_RANK": str(slot.local_rank),
        "HOROVOD_LOCAL_SIZE": str(slot.local_size),
        "HOROVOD_CROSS_RANK": str(slot.cross_rank),
        "HOROVOD_CROSS_SIZE": str(slot.cross_size),
    }


def exported(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that also hold on other hosts: all but a few, such as this host's choice of GPUs."""
    return {name: value for name, value in environment.items() if is_exportable(name)}


def remote_command(command: Sequence[str], host: str, port: int | None, identity: Path | None) -> str:
    """Returns what a shell of this host runs, to run a command in the same folder of another host.

    Args:
        command: the words of the command.
        host: the other host.
        port: of its ssh; None for the usual one.
        identity: the file with the key; None for the usual one.
    """
    inner = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"
    key = None if identity is None else shlex.quote(str(identity))
    return f"exec {get_remote_command(shlex.quote(inner), host, port, key, _CONNECTING_TIME)}"
