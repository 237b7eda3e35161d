"""Runs a job once: starts its ranks on all hosts, follows them to their ends, and ends them when one fails.

    agents are there ──▶ ranks run ──┬──▶ all have ended by themselves
    (or nothing starts)              ├──▶ one fails ──▶ the others have a moment to end ─┐
                                     └──▶ a signal ──────────────────────────────────────┴──▶ SIGTERM, SIGKILL

No rank starts before the agents of all hosts are there.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from smp_tf.launch import endings, wire_up
from smp_tf.launch.agent import ENDED, ERR, NO_RANK, OUT, STARTED, TROUBLE, Frame
from smp_tf.launch.agent_link import AgentLink, agent_command
from smp_tf.launch.errors import LaunchError
from smp_tf.launch.interrupts import Interrupts
from smp_tf.launch.screen import Screen
from smp_tf.launch.wire_up import HostRanks, Store

#: The variable that tells a script which try of its job it is, 1 for the first.
TRY = "SMP_TF_TRY"
#: Seconds that ranks have to end by themselves after one has failed. They may know of it and say why.
_PATIENCE = 2.0
#: Seconds after the grace time in which a host must say that its ranks have ended.
_LAST_WORDS = 5.0


@dataclass(frozen=True)
class Request:
    """What is to run, and where.

    Args:
        command: what every rank runs.
        folder: the folder in which it runs.
        hosts: the hosts with their ranks.
        environment: variables for ranks on this host, besides those of this process.
        exported: variables for ranks on other hosts.
        grace: seconds from SIGTERM to SIGKILL.
        remote: how other hosts are reached.
    """

    command: Sequence[str]
    folder: str
    hosts: Sequence[HostRanks]
    environment: Mapping[str, str]
    exported: Mapping[str, str]
    grace: float
    remote: Remote

    @property
    def size(self) -> int:
        """Returns the number of ranks."""
        return sum(len(host.slots) for host in self.hosts)


@dataclass(frozen=True)
class Remote:
    """How other hosts are reached.

    Args:
        ssh_port: None for the usual one.
        ssh_identity: a file with a key; None for the usual one.
        interface: the network interface between hosts; None for the one that leads there.
        start_timeout: seconds in which all hosts must be there.
    """

    ssh_port: int | None = None
    ssh_identity: Path | None = None
    interface: str | None = None
    start_timeout: float = 30.0


@dataclass(frozen=True)
class RankEnd:
    """The end of a rank.

    Args:
        rank: the rank.
        host: where it ran.
        pid: its process.
        status: as `subprocess` gives it; None where its host was lost.
        is_asked: whether it was told to end before.
    """

    rank: int
    host: str
    pid: int
    status: int | None
    is_asked: bool = False

    @property
    def has_failed(self) -> bool:
        """Returns whether it ended other than well."""
        return self.status != 0


@dataclass
class JobEnd:
    """The end of a job.

    Args:
        ends: those of its ranks, in the order in which they came.
        signal: the signal that ended it; None where none did.
        last_words: what a host that was lost said last, by host.
    """

    ends: list[RankEnd] = field(default_factory=list)
    signal: int | None = None
    last_words: dict[str, list[str]] = field(default_factory=dict)

    @property
    def has_failed(self) -> bool:
        """Returns whether a rank has failed, or a signal ended it."""
        return self.signal is not None or any(end.has_failed for end in self.ends)


def run_job(request: Request, store: Store, screen: Screen, number: int) -> JobEnd:
    """Runs a job once.

    Args:
        request: what is to run.
        store: where ranks leave their addresses.
        screen: shows what they print.
        number: which try it is, 1 for the first.

    Raises:
        LaunchError: the ranks cannot be started.
    """
    store.forget(request.hosts)
    with _Links(request) as links, Interrupts(links.on_signal) as interrupts:
        running = _RunningJob(request, screen, links, interrupts)
        if running.await_agents():
            running.start(store.server_port, number)
            running.follow()
        running.end.signal = interrupts.first
        return running.end


class _Links:
    """The agents of all hosts, within a context."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.of: dict[str, AgentLink] = {}

    def __enter__(self) -> _Links:
        remote = self._request.remote
        for host in self._request.hosts:
            command: list[str] | str = agent_command()
            if not host.is_here:
                command = wire_up.remote_command(command, host.name, remote.ssh_port, remote.ssh_identity)
            self.of[host.name] = AgentLink(command)
        return self

    def __exit__(self, *error: object) -> None:
        for link in self.of.values():
            link.close()

    def tell(self, message: Mapping[str, object]) -> None:
        """Tells all agents something."""
        for link in self.of.values():
            link.send(message)

    def on_signal(self, number: int, count: int) -> None:
        """Lets all agents end their ranks; with a second signal kill them; with a third one this launcher ends.

        Args:
            number: of the signal.
            count: how many have come.
        """
        self.tell({"end": True} if count == 1 else {"kill": True})
        if count > 2:
            for link in self.of.values():
                link.kill()
            os._exit(endings.exit_code(-number))


class _RunningJob:
    def __init__(self, request: Request, screen: Screen, links: _Links, interrupts: Interrupts) -> None:
        self._request, self._screen, self._links, self._interrupts = request, screen, links, interrupts
        self.end = JobEnd()
        self._ended: set[int] = set()
        self._is_asked = False
        #: When all are asked to end, after a rank has failed; when what has not ended is given up.
        self._ask_at: float | None = None
        self._give_up_at: float | None = None

    def await_agents(self) -> bool:
        """Waits until the agents of all hosts are there. Returns whether they are; a signal may end the wait.

        Raises:
            LaunchError: a host cannot be reached.
        """
        timeout = self._request.remote.start_timeout
        until = time.monotonic() + timeout
        with self._selector() as selector:
            while missing := [name for name, link in self._links.of.items() if not link.is_there]:
                if self._interrupts.first is not None:
                    return False
                left = until - time.monotonic()
                if left <= 0:
                    raise LaunchError(
                        f"{_hosts_in_words(missing)} did not answer within {timeout:g} s (--start-timeout). Try: "
                        f"ssh {missing[0]} hostname"
                    )
                for key, _ in selector.select(left):
                    self._handle_start(key, selector)
        return self._interrupts.first is None

    def _handle_start(self, key: selectors.SelectorKey, selector: selectors.BaseSelector) -> None:
        host, what = key.data
        if host is None:
            self._interrupts.heard()
            return
        link = self._links.of[host]
        if what == "words":
            if not link.read_words():
                selector.unregister(key.fd)
            return
        link.read()
        if link.is_gone:
            while link.read_words():
                pass
            raise LaunchError(_unreachable(host, link))

    def start(self, port: int, number: int) -> None:
        """Lets the agents start the ranks.

        Args:
            port: of the store.
            number: which try it is.
        """
        request = self._request
        for host in request.hosts:
            variables = request.environment if host.is_here else request.exported
            job = {
                "command": list(request.command),
                "folder": request.folder,
                "grace": request.grace,
                "environment": {**variables, **wire_up.variables_of_job(host, port), TRY: str(number)},
                "interface": wire_up.loopback() if host.peer is None else request.remote.interface,
                "interface variables": wire_up.INTERFACE_VARIABLES,
                "peer": host.peer,
                "ranks": [
                    {
                        "rank": slot.rank,
                        "environment": wire_up.variables_of_rank(slot),
                        "out": self._screen.size_for(slot.rank, OUT),
                        "err": self._screen.size_for(slot.rank, ERR),
                    }
                    for slot in host.slots
                ],
            }
            self._links.of[host.name].send(job)

    def follow(self) -> None:
        """Follows the ranks until all have ended.

        Raises:
            LaunchError: a rank cannot be started.
        """
        with self._selector() as selector:
            while not all(link.is_gone for link in self._links.of.values()):
                for key, _ in selector.select(self._until_due()):
                    self._handle(key, selector)
                self._do_what_is_due()

    def _handle(self, key: selectors.SelectorKey, selector: selectors.BaseSelector) -> None:
        host, what = key.data
        if host is None:
            if self._interrupts.heard() and self._interrupts.first is not None:
                self._interrupt()
            else:
                self._pass_on_size()
            return
        link = self._links.of[host]
        if what == "words":
            words = link.read_words()
            for line in words:
                self._screen.say(line)
            if not words:
                selector.unregister(key.fd)
            return
        for frame in link.read():
            self._take(host, link, frame)
        if link.is_gone:
            selector.unregister(key.fd)
            self._lose(host, link)

    def _take(self, host: str, link: AgentLink, frame: Frame) -> None:
        if frame.kind in (OUT, ERR):
            self._screen.take(frame.rank, frame.kind, frame.content)
        elif frame.kind == STARTED:
            pid = link.living[frame.rank] = int(frame.content)
            where = wire_up.name_of(host)
            self._screen.begin(frame.rank, f"rank {frame.rank} of {self._request.size} on {where}, process {pid}")
        elif frame.kind == ENDED:
            self._screen.end(frame.rank)
            pid = link.living.pop(frame.rank)
            self._note(RankEnd(frame.rank, wire_up.name_of(host), pid, int(frame.content), self._is_asked))
        elif frame.kind == TROUBLE:
            raise LaunchError(_trouble(host, frame))

    def _note(self, end: RankEnd) -> None:
        self.end.ends.append(end)
        if end.has_failed and self._ask_at is None:
            self._ask_at = time.monotonic() + _PATIENCE

    def _lose(self, host: str, link: AgentLink) -> None:
        """Notes the ranks that have not ended when their agent did."""
        if link.living:
            self.end.last_words[wire_up.name_of(host)] = list(link.told)
        for rank, pid in list(link.living.items()):
            self._screen.end(rank)
            self._note(RankEnd(rank, wire_up.name_of(host), pid, None, self._is_asked))
        link.living.clear()

    def _interrupt(self) -> None:
        if not self._is_asked:
            self._ask()
            name = endings.name_of(self._interrupts.first or 0)
            self._screen.say(
                f"smp-tf: {name}: all ranks end, within {self._request.grace:g} s. A second one kills them at once."
            )

    def _ask(self) -> None:
        self._is_asked = True
        self._links.tell({"end": True})
        self._give_up_at = time.monotonic() + self._request.grace + _LAST_WORDS

    def _pass_on_size(self) -> None:
        self._screen.look_at_size()
        size = next(filter(None, (self._screen.size_for(0, kind) for kind in (OUT, ERR))), None)
        if size is not None:
            self._links.tell({"size": size})

    def _until_due(self) -> float | None:
        times = [self._give_up_at, None if self._is_asked else self._ask_at]
        due = [at for at in times if at is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        if self._ask_at is not None and not self._is_asked and now >= self._ask_at:
            self._ask()
        if self._give_up_at is not None and now >= self._give_up_at:
            self._give_up_at = None
            for link in self._links.of.values():
                if not link.is_gone:
                    link.kill()

    @contextmanager
    def _selector(self) -> Iterator[selectors.BaseSelector]:
        with selectors.DefaultSelector() as selector:
            selector.register(self._interrupts.descriptor, selectors.EVENT_READ, (None, "signal"))
            for host, link in self._links.of.items():
                selector.register(link.outgoing, selectors.EVENT_READ, (host, "frames"))
                selector.register(link.words, selectors.EVENT_READ, (host, "words"))
            yield selector


def _hosts_in_words(names: Iterable[str]) -> str:
    found = list(names)
    return f"Host {found[0]}" if len(found) == 1 else f"Hosts {', '.join(found)}"


def _unreachable(host: str, link: AgentLink) -> str:
    said = "; ".join(link.told) or "it said nothing"
    return (
        f"The ranks of host {host} cannot be started: {said}. Every host must be reached by `ssh {host}` without a "
        f"password, and have the same folder and Python at the same place."
    )


def _trouble(host: str, frame: Frame) -> str:
    words = frame.content.decode(errors="replace")
    if frame.rank == NO_RANK:
        return (
            f"Host {host} finds no way to another host of the job. {words}. --network-interface names the interface "
            f"between them, such as eth0."
        )
    return f"Rank {frame.rank} cannot be started on host {host}. {words}."
