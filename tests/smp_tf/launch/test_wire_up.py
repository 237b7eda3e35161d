"""Who is on which host, how hosts reach each other, and what ranks on other hosts are given."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path

import pytest

from smp_tf.launch import wire_up
from smp_tf.launch.errors import LaunchError
from smp_tf.launch.host_list import HostList
from smp_tf.launch.wire_up import HostRanks, assign, remote_command


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network in which "here" is this host, and which addresses lead to the others."""
    monkeypatch.setattr(wire_up, "is_here", lambda host: host == "here")
    monkeypatch.setattr(wire_up, "address_towards", lambda host: f"address towards {host}")


def seen(hosts: list[HostRanks]) -> list[tuple[str, list[int], str | None, str]]:
    return [(host.name, [slot.rank for slot in host.slots], host.peer, host.address) for host in hosts]


@pytest.mark.usefixtures("network")
def test_ranks_go_host_by_host_and_hosts_find_each_other() -> None:
    assert seen(assign(HostList({"here": 2, "b": 2, "c": 4}, "-H", 5))) == [
        ("here", [0, 1], "b", "address towards b"),
        ("b", [2, 3], "here", "address towards b"),
        ("c", [4], "here", "address towards c"),
    ]
    assert seen(assign(HostList({"here": 2, "b": 2}, "-H", 2))) == [("here", [0, 1], None, "127.0.0.1")]
    # The launcher is on neither.
    assert seen(assign(HostList({"b": 1, "c": 1}, "-H", 2))) == [
        ("b", [0], "c", "address towards b"),
        ("c", [1], "b", "address towards c"),
    ]
    assert seen(assign(HostList({"b": 2}, "-H", 2))) == [("b", [0, 1], "address towards b", "address towards b")]


@pytest.mark.usefixtures("network")
def test_ranks_are_numbered_as_horovod_numbers_them() -> None:
    hosts = assign(HostList({"here": 1, "b": 2}, "-H", 3))
    assert [wire_up.variables_of_rank(slot) for host in hosts for slot in host.slots][1] == {
        "HOROVOD_HOSTNAME": "b",
        "HOROVOD_RANK": "1",
        "HOROVOD_SIZE": "3",
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "1",
        "HOROVOD_CROSS_SIZE": "2",
    }


def test_names_of_this_host_are_known() -> None:
    assert all(wire_up.is_here(name) for name in ("localhost", "127.0.0.1", socket.gethostname()))
    assert not wire_up.is_here("192.0.2.1")
    with pytest.raises(LaunchError, match="has no address that this host knows"):
        wire_up.is_here("no-such-host.invalid")
    assert wire_up.name_of("localhost") == socket.gethostname()
    assert wire_up.loopback() in [name for _, name in socket.if_nameindex()]


def test_other_hosts_keep_what_is_theirs() -> None:
    given = {"PATH": "/bin", "A": "1", "CUDA_VISIBLE_DEVICES": "0", "BASH_FUNC_x%%": "()", "OLDPWD": "/"}
    assert wire_up.exported(given) == {"PATH": "/bin", "A": "1"}


def test_the_command_for_another_host_is_one_word_for_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "it's here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    words = shlex.split(remote_command(["python", "a b"], "b", 22, Path("my key")))
    assert words[:2] == ["exec", "ssh"]
    assert words[-1] == f"cd {shlex.quote(str(folder))} && exec python 'a b'"
    assert words[-8:-1] == ["b", "-p", "22", "-i", "my key", "-o", "ConnectTimeout=10"]
