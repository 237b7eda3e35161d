"""Hosts and slots from `-H`, a file and Slurm's variables, and what is said of those that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from smp_tf.launch.errors import LaunchError
from smp_tf.launch.host_list import choose_hosts
from smp_tf.launch.slurm import names_in

SLURM = {"SLURM_JOB_NODELIST": "gpu[01-02,7],login", "SLURM_TASKS_PER_NODE": "4(x2),1,2"}


@pytest.fixture(autouse=True)
def no_scontrol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")


def test_this_host_is_taken_where_none_is_named() -> None:
    found = choose_hosts(3, None, None, {})
    assert (found.slots, found.size) == ({"localhost": 3}, 3)


def test_hosts_are_named_with_their_slots() -> None:
    assert choose_hosts(None, "a:2, b.c-d:3", None, SLURM).slots == {"a": 2, "b.c-d": 3}
    assert choose_hosts(None, "a:2,b:3", None, {}).size == 5
    assert choose_hosts(3, "a:2,b:3", None, {}).size == 3


def test_a_file_names_hosts(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# ours\n\nhost1 slots=4  # fast\nhost2 slots = 2 max_slots=8\nhost3:1\n")
    assert choose_hosts(None, None, file, SLURM).slots == {"host1": 4, "host2": 2, "host3": 1}


def test_slurm_names_hosts() -> None:
    found = choose_hosts(None, None, None, SLURM)
    assert found.slots == {"gpu01": 4, "gpu02": 4, "gpu7": 1, "login": 2}
    assert found.size == 11
    one = {"SLURM_JOB_NODELIST": "n1,n2", "SLURM_NTASKS_PER_NODE": "3"}
    assert choose_hosts(None, None, None, one).slots == {"n1": 3, "n2": 3}
    assert choose_hosts(None, None, None, {"SLURM_JOB_NODELIST": "n1"}).slots == {"n1": 1}


def test_slurms_own_command_is_asked_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "scontrol"
    command.write_text('#!/bin/sh\n[ "$1 $2 $3" = "show hostnames strange{1}" ] && echo a && echo b\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    environment = {"SLURM_JOB_NODELIST": "strange{1}", "SLURM_TASKS_PER_NODE": "2(x2)"}
    assert choose_hosts(None, None, None, environment).slots == {"a": 2, "b": 2}


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[08-10]x", ["n08x", "n09x", "n10x"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
    ],
)
def test_lists_of_slurm_are_expanded(nodes: str, names: list[str]) -> None:
    assert list(names_in(nodes)) == names


@pytest.mark.parametrize("nodes", ["n[1-", "n[a-b]", "a,,b", "n(1)"])
def test_what_is_no_list_of_slurm_is_refused(nodes: str) -> None:
    with pytest.raises(LaunchError, match=r"is no list of hosts\. Name them with -H host:slots"):
        list(names_in(nodes))


@pytest.mark.parametrize(
    ("size", "hosts", "words"),
    [
        (None, None, "Say how many processes there are to be, such as: smp-tf run -np 2 train.py"),
        (0, None, "-np must be at least 1. Received: 0."),
        (5, "a:2,b:2", "5 ranks are to run, and there are 4 slots (-H a:2,b:2: a:2, b:2). Name more with -H"),
        (None, "a", "-H takes hosts with numbers of ranks, host1:4,host2:4. Received: 'a'."),
        (None, "a:1,a:2", "-H names host a twice."),
        (None, "a:0", "-H gives host a no slots."),
    ],
)
def test_hosts_that_do_not_do_are_told(size: int | None, hosts: str | None, words: str) -> None:
    with pytest.raises(LaunchError) as told:
        choose_hosts(size, hosts, None, {})
    assert words in str(told.value)


def test_a_file_that_does_not_do_is_told(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    with pytest.raises(LaunchError, match="cannot be read: No such file or directory"):
        choose_hosts(None, None, file, {})
    file.write_text("host1 slots=4\nhost2\n")
    with pytest.raises(LaunchError, match=r"line 2, names no host with its slots, such as `host1 slots=4`.*'host2'"):
        choose_hosts(None, None, file, {})
    file.write_text("# nothing\n")
    with pytest.raises(LaunchError, match="names no host"):
        choose_hosts(None, None, file, {})
    with pytest.raises(LaunchError, match="both name hosts"):
        choose_hosts(None, "a:1", file, {})


def test_variables_of_slurm_that_do_not_fit_are_told() -> None:
    with pytest.raises(LaunchError, match=r"names 2 hosts .* and tasks of 3 "):
        choose_hosts(None, None, None, {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x3)"})
    with pytest.raises(LaunchError, match="is no list of numbers of tasks"):
        choose_hosts(None, None, None, {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "two"})
    with pytest.raises(LaunchError, match=r"srun has started this command 4 times\. Call `smp-tf run` once"):
        choose_hosts(None, None, None, {**SLURM, "SLURM_STEP_NUM_TASKS": "4"})
