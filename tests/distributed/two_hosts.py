"""Two hosts made of one machine, for what only happens between hosts: namespaces that a cable joins.

    host-a (10.79.0.1) ─ eth0 ════════ eth0 ─ host-b (10.79.0.2)
    the command, and ranks             ranks, started by `ssh`

    python -m tests.distributed.two_hosts --rate 1gbit horovodrun -np 2 -H host-a:1,host-b:1 python train.py

Each host has its own name, network and shared memory, and host-b its own process ids: what its ranks see of those on
host-a comes through the cable. `ssh` is a script that enters the other host with an environment of its own, as `sshd`
does, and whose end is seen there. Both hosts end with the process that made them, and leave nothing behind. It takes
root, and what `apt-get install iproute2 util-linux` installs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ADDRESSES = {"host-a": "10.79.0.1", "host-b": "10.79.0.2"}
_NAMESPACES = ("--net", "--uts", "--ipc", "--mount")
# UCX looks for devices in /sys, which shows those of the namespace that it was mounted in.
_SET_UP = """
set -e
hostname {name}
mount --bind {folder}/hosts /etc/hosts
mount -t sysfs sysfs /sys
ip link set lo up
ip address add {address}/24 dev eth0
ip link set eth0 up
{slower}
"""
# The outer sh stands for sshd: it ends when the one who called does, and what it has started sees that. The command is
# one text, which a shell of the host reads.
_SSH = """#!/bin/sh
host=
while [ $# -gt 0 ]; do
    case $1 in
        -o) shift 2 ;;
        *) [ -z "$host" ] || break; host=$1; shift ;;
    esac
done
case $host in
{cases}
    *) echo "ssh: no host $host" >&2; exit 255 ;;
esac
exec nsenter --target $inside --all env -i HOME=/tmp PATH=/usr/bin:/bin \\
    setpriv --pdeathsig KILL sh -c 'sh -c "$1"; exit $?' sshd "$*"
"""


class NoHostsError(Exception):
    """This machine does not allow what two hosts are made of; the message says what."""


@dataclass(frozen=True)
class TwoHosts:
    """Two hosts that are there.

    Attributes:
        inside: per host, a process that is in it.
        folder: where `ssh` is.
    """

    inside: Mapping[str, int]
    folder: Path

    def command(self, words: Sequence[str], host: str = "host-a") -> list[str]:
        """What runs a command on a host, in this process's folder and environment, with `ssh` to the other."""
        enter = ["nsenter", "--target", str(self.inside[host]), "--all"]
        path = f"PATH={self.folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        return [*enter, "env", "-C", str(Path.cwd()), path, *words]


def _run(*words: str, script: str | None = None) -> None:
    try:
        done = subprocess.run(words, input=script, capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        raise NoHostsError(f"there is no command {words[0]!r} (apt-get install iproute2 util-linux)") from None
    if done.returncode != 0:
        raise NoHostsError(f"{' '.join(words)} failed: {(done.stderr or done.stdout).strip()}")


@contextlib.contextmanager
def _namespaces(*kinds: str) -> Iterator[int]:
    """New namespaces, for as long as the context lasts; the id of a process in them."""
    # Its standard input ends with this process, however that ends.
    words = ["unshare", *kinds, "sh", "-c", "echo $$; exec cat"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stderr is not None
        if not holder.stdout.readline():
            raise NoHostsError(f"{' '.join(words)} failed: {holder.stderr.read().decode().strip()}")
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
        try:
            yield int(children[0]) if "--fork" in kinds else holder.pid
        finally:
            holder.stdin.close()


@contextlib.contextmanager
def two_hosts(rate: str = "") -> Iterator[TwoHosts]:
    """Two hosts, for as long as the context lasts; what runs on host-b then ends, what runs on host-a does not.

    Args:
        rate: of the cable in either direction, as `tc` says it, such as "1gbit"; as fast as it goes if empty.

    Raises:
        NoHostsError: this machine does not allow it.
    """
    if os.geteuid() != 0:
        raise NoHostsError("only root may make network namespaces")
    # A burst is larger than the largest packet, of 64 KB.
    slower = f"tc qdisc add dev eth0 root tbf rate {rate} burst 256kb latency 50ms" if rate else ""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="smp-hosts-")))
        lines = [f"{address} {name}" for name, address in ADDRESSES.items()]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        try:
            a = stack.enter_context(_namespaces(*_NAMESPACES))
            b = stack.enter_context(_namespaces(*_NAMESPACES, "--pid", "--fork", "--kill-child", "--mount-proc"))
        except FileNotFoundError:
            raise NoHostsError("there is no command 'unshare' (apt-get install util-linux)") from None
        inside = {"host-a": a, "host-b": b}
        _run(*f"ip link add eth0 netns {a} type veth peer name eth0 netns {b}".split())
        for name, address in ADDRESSES.items():
            script = _SET_UP.format(name=name, address=address, folder=folder, slower=slower)
            _run("nsenter", "--target", str(inside[name]), "--all", "sh", script=script)
        cases = "\n".join(f"    {name} | {address}) inside={inside[name]} ;;" for name, address in ADDRESSES.items())
        (folder / "ssh").write_text(_SSH.replace("{cases}", cases))
        (folder / "ssh").chmod(0o755)
        yield TwoHosts(inside, folder)


def main() -> int:
    """Runs a command on host-a, and returns how it ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="", help="of the cable, such as 1gbit")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    try:
        with two_hosts(args.rate) as hosts:
            return subprocess.run(hosts.command(args.command)).returncode
    except NoHostsError as error:
        print(f"no two hosts: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
