"""Who has come to `smp.init`, and whose process has ended since.

Before the ranks have met, one knows of the others what each leaves in the store of the launcher, `horovodrun`:

    rank 0 ── PUT /smp_tf.1/0 ──▶ ┌───────────┐
                                  │ its store │ ◀── GET /smp_tf.1/1 ── rank 0: has rank 1 come, where does it run,
    rank 1 ── PUT /smp_tf.1/1 ──▶ └───────────┘                                and as which process?

Under other launchers, which have no such store, nothing is known; Open MPI's says itself on which host a rank ended.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smp_tf import hosts
from smp_tf.environment import world_rank, world_size

_ADDRESS, _PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"
_LOCAL_RANK, _LOCAL_SIZE = "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"
# The names of a few tell what is wrong, and one launcher answers all ranks.
_MOST_NAMES = 4
_ASKING_TIME = 3.0
# From the end of a process's connections to its own.
_LOST_TIME = 0.5

# All ranks start equally often: what they have left in an earlier start is none of the next one.
_starts = itertools.count(1)


def this_host() -> str:
    """What this host calls itself."""
    return socket.gethostname()


def this_process() -> dict[str, Any]:
    """Where this process runs: `host`, `machine` (see `hosts.machine`) and `pid`."""
    return {"host": this_host(), "machine": hosts.machine(), "pid": os.getpid()}


def in_words(rank: int, process: Mapping[str, Any]) -> str:
    """Names a rank whose process is known, as `this_process` says it there."""
    return f"rank {rank} (host {process['host']}, pid {process['pid']})"


def _has_ended(pid: int) -> bool:
    try:
        # Behind the command's name, which is in brackets and may hold anything.
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


class Arrivals:
    """Which ranks have come to one start, as the launcher's store has it.

    Args:
        environment: where the launcher says how many ranks there are, and where it is.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._scope = f"smp_tf.{next(_starts)}"
        self._size, self._rank = world_size(environment), world_rank(environment)
        self._store: tuple[str, int] | None = None
        if self._size > 1 and {_ADDRESS, _PORT} <= environment.keys():
            self._store = environment[_ADDRESS], int(environment[_PORT])
        # horovodrun numbers the ranks of a host without a gap.
        first = self._rank - int(environment.get(_LOCAL_RANK, "0"))
        self._here = range(first, first + int(environment.get(_LOCAL_SIZE, "1")))
        self._known: dict[int, dict[str, Any]] = {}

    def enter(self) -> None:
        """Leaves there that this rank has come."""
        said = {**this_process(), "ranks of its host": [self._here.start, self._here.stop]}
        with contextlib.suppress(_NoAnswerError):
            self._ask("PUT", self._rank, json.dumps(said).encode())

    def met(self, processes: Sequence[Mapping[str, Any]]) -> None:
        """All have: nobody need be asked any more.

        Args:
            processes: what `this_process` said, in rank order.
        """
        self._known.update(enumerate(map(dict, processes)))

    def missing(self) -> list[int] | None:
        """Ranks that have not come, up to some; None where that cannot be known."""
        deadline = time.monotonic() + _ASKING_TIME
        missing: list[int] = []
        # Those of this host first: of them it is known where they are to run.
        others = (rank for rank in range(self._size) if rank not in self._here)
        try:
            for rank in (*self._here, *others):
                if len(missing) == _MOST_NAMES or time.monotonic() > deadline:
                    break
                if not self._has_come(rank):
                    missing.append(rank)
        except _NoAnswerError:
            return None
        return sorted(missing)

    def lost(self) -> list[str]:
        """Ranks on this machine that have come and whose processes have ended, in words; one about to has a moment."""
        with contextlib.suppress(_NoAnswerError):
            for rank in self._here:
                self._has_come(rank)
        machine = hosts.machine()
        here = {rank: process for rank, process in sorted(self._known.items()) if process["machine"] == machine}
        deadline = time.monotonic() + _LOST_TIME
        while True:
            found = [in_words(rank, process) for rank, process in here.items() if _has_ended(process["pid"])]
            if found or time.monotonic() > deadline:
                return found
            time.sleep(0.01)

    def in_words(self, rank: int) -> str:
        """Names a rank, with its host where that is known."""
        if rank in self._known:
            return in_words(rank, self._known[rank])
        if rank in self._here:
            return f"rank {rank} (host {this_host()})"
        for other in list(self._known.values()):
            first, stop = other["ranks of its host"]
            if rank in range(first, stop):
                return f"rank {rank} (host {other['host']})"
        return f"rank {rank}"

    def missing_in_words(self) -> str:
        """Whom a start waits for, in words: "other ranks" where that is not known."""
        return _listed([self.in_words(rank) for rank in self.missing() or ()])

    def _has_come(self, rank: int) -> bool:
        if rank not in self._known:
            said = self._ask("GET", rank)
            if said:
                self._known[rank] = json.loads(said)
        return rank in self._known

    def _ask(self, method: str, rank: int, body: bytes | None = None) -> bytes:
        """What the store answers about a rank; b"" where it has nothing."""
        if self._store is None:
            raise _NoAnswerError
        asking = http.client.HTTPConnection(*self._store, timeout=_ASKING_TIME)
        try:
            asking.request(method, f"/{self._scope}/{rank}", body)
            answer = asking.getresponse()
            return answer.read() if answer.status == http.client.OK else b""
        except (OSError, http.client.HTTPException) as error:
            # Who ends has no time to wait twice.
            self._store = None
            raise _NoAnswerError from error
        finally:
            asking.close()


class _NoAnswerError(Exception):
    """There is no store, or it does not answer."""


def _listed(missing: Sequence[str]) -> str:
    if not missing:
        return "other ranks"
    names = ", ".join(missing) + (" and others" if len(missing) == _MOST_NAMES else "")
    return f"{names}, which {'have' if len(missing) > 1 else 'has'} not come to it"
