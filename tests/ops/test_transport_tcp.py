"""The transport as it is opened between hosts: over the network, and over no other interface than it is told."""

from __future__ import annotations

import socket

import psutil
import pytest

from tests.ops.rank_fleet import RankFleet

#: The state of a socket in /proc/net/tcp.
LISTENS = "0A"


def interface() -> tuple[str, str]:
    """A network interface of this machine, and its address; over the loopback UCX finds no way."""
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if (
                address.family == socket.AF_INET
                and not address.address.startswith("127.")
                and psutil.net_if_stats()[name].isup
            ):
                return name, address.address
    pytest.skip("This machine has no network interface but the loopback.")


def as_in_proc(address: str) -> str:
    """An IPv4 address as /proc/net/tcp writes it, on a machine that is little-endian."""
    return socket.inet_aton(address)[::-1].hex().upper()


def test_messages_over_tcp_and_the_interface_that_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    name, address = interface()
    # Ranks of one host have nothing but the network here, as those of two.
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    with RankFleet("bytes_both_ways", 2, single_host=False, network_devices=name) as ranks:
        for rank in ranks.ranks:
            assert rank.expect("order")["right"]
            assert rank.expect("error")["type"] == "TransportTimeoutError"
        assert ranks[1].expect("big")["right"]
        for rank in ranks.ranks:
            assert rank.expect("error")["type"] == "TransportTimeoutError"
            rank.expect("idle")
            assert rank.expect("stats")["lanes"] == ["tcp"]
            sockets = [line.split() for line in rank.expect("network")["sockets"]]
            assert sockets
            assert {(fields[0], fields[2].split(":")[0]) for fields in sockets} == {("tcp", as_in_proc(address))}
        # Else a connection would last as long as the child, and not end for the other rank with this one.
        children = ranks[1].expect("children")
        for found in (children["forked"], children["started"]):
            assert [line for line in found if line.split()[4] != LISTENS] == []
        ranks.command("leave")
        assert [rank.wait(timeout=10) for rank in ranks.ranks] == [0, 0]
