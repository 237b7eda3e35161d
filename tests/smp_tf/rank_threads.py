"""Several ranks in one process: a thread each, with queues in place of the transport."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from smp_tf.job import exchange as control
from smp_tf.job import objects as messaging
from smp_tf.job.channel import ControlChannel
from smp_tf.job.topology import Topology
from smp_tf.partition.mesh import Mesh

#: A thread that waits longer than this has found nobody who answers.
DEADLINE = 20.0


class Queues:
    """What is on its way between the ranks, by sender, receiver and tag."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[tuple[int, int, int], queue.Queue[bytes]] = defaultdict(queue.Queue)

    def between(self, source: int, destination: int, tag: int) -> queue.Queue[bytes]:
        """The messages of one tag from one rank to another."""
        with self._lock:
            return self._queues[source, destination, tag]


class QueueTransport:
    """One rank's end of the queues: what exchanges and messages need of a transport."""

    def __init__(self, rank: int, queues: Queues) -> None:
        self.rank = rank
        self.activities: list[str] = []
        self.program_ranks: dict[int, list[int]] = {}
        self.averaging_ranks: dict[int, list[int]] = {}
        self._queues = queues

    def send_bytes(self, dest: int, tag: int, data: bytes, timeout: float | None = None, label: str = "") -> None:
        """As `Transport.send_bytes`."""
        assert dest != self.rank
        self._queues.between(self.rank, dest, tag).put(bytes(data))

    def recv_bytes(
        self,
        src: int,
        tag: int,
        timeout: float | None = None,
        while_waiting: Callable[[], None] | None = None,
        label: str = "",
    ) -> memoryview:
        """As `Transport.recv_bytes`."""
        try:
            return memoryview(self._queues.between(src, self.rank, tag).get(timeout=min(timeout or DEADLINE, DEADLINE)))
        except queue.Empty:
            raise TimeoutError from None

    def set_program_ranks(self, program: int, ranks: Iterable[int]) -> None:
        """As `Transport.set_program_ranks`; kept for the test to look at."""
        self.program_ranks[program] = list(ranks)

    def set_averaging_ranks(self, program: int, ranks: Iterable[int]) -> None:
        """As `Transport.set_averaging_ranks`; kept for the test to look at."""
        self.averaging_ranks[program] = list(ranks)

    def set_activity(self, text: str) -> None:
        """As `Transport.set_activity`; kept for the test to look at."""
        self.activities.append(text)


class Ranks:
    """Runs a function on all ranks of a world at once.

    Args:
        monkeypatch: puts each rank's runtime where messaging and control look for it.
        size: ranks in the world.
        partitions: stages of a replica.
        stall_timeout: seconds an exchange waits for a rank.
        shards: tensor shards of a stage.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        size: int,
        partitions: int = 1,
        stall_timeout: float = DEADLINE,
        shards: int = 1,
    ) -> None:
        queues, mesh = Queues(), Mesh(size, partitions, shards=shards)
        self.transports = [QueueTransport(rank, queues) for rank in range(size)]
        self._runtimes = []
        for rank, transport in enumerate(self.transports):
            topology = Topology(
                mesh=mesh,
                rank=rank,
                local_rank=rank,
                local_size=size,
                hosts=("host",) * size,
                pids=tuple(100 + other for other in range(size)),
            )
            channel = ControlChannel(rank, transport, stall_timeout)  # type: ignore[arg-type]
            config = SimpleNamespace(stall_timeout=stall_timeout)
            self._runtimes.append(
                SimpleNamespace(topology=topology, transport=transport, control=channel, config=config)
            )
        self._here = threading.local()
        for module in (control, messaging):
            monkeypatch.setattr(module, "current", self.current)

    def current(self) -> Any:
        """The runtime of the rank whose thread this is."""
        return self._here.runtime

    def in_thread_of(self, rank: int) -> None:
        """Make the thread that calls it one more of a rank."""
        self._here.runtime = self._runtimes[rank]

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """What the function gives on each rank, or the error it raises there."""

        def on(rank: int) -> Any:
            self.in_thread_of(rank)
            try:
                return function(rank)
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(self._runtimes)) as threads:
            return list(threads.map(on, range(len(self._runtimes))))
