"""Tells which ranks have imported smp_tf or come to `smp.init`, and whose processes have ended since.

Before the ranks have met, each leaves a note in the store of the launcher, `horovodrun`, and reads those of the others:

    import smp_tf ── PUT /smp_tf.0/1 ──▶ ┌───────────┐ ◀── GET /smp_tf.1/1 ── rank 0: has rank 1 come to smp.init?
                                         │ its store │
    smp.init ─────── PUT /smp_tf.1/1 ──▶ └───────────┘ ◀── GET /smp_tf.0/1 ── rank 0: where does it run, as which
                                                                              process, and does it end for another?

Other launchers have no such store, so nothing is known. Open MPI's launcher says itself on which host a rank ended.
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

from smp_tf.start import hosts, shared_memory
from smp_tf.start.environment import number, world_rank, world_size

_ADDRESS, _PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"
_LOCAL_RANK, _LOCAL_SIZE = "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"
# How many ranks are asked about. A few names tell what is wrong, and one launcher answers all ranks.
_MOST_NAMES = 4
_ASKING_TIME = 3.0
# Seconds for a rank that is ended to find out why. The launcher kills it seconds later.
_ENDING_TIME = 2.0
# Seconds from the end of a process's connections to its own end.
_LOST_TIME = 0.5
# Keys of a rank's note. They say that it is about to end, and whether another is the cause or it itself.
_FOLLOWS, _FAILS = "ends for another", "ends by itself"
# Seconds between two looks for processes that have ended.
_PAUSE = 0.02

# The start in which a process leaves its note when it imports smp_tf, before its first real start.
_IMPORT = 0
# All ranks start equally often. So notes of an earlier start do not count in the next one.
_starts = itertools.count(_IMPORT + 1)


def this_host() -> str:
    """Returns this host's name for itself."""
    return socket.gethostname()


def this_process() -> dict[str, Any]:
    """Returns where this process runs: `host`, `machine` (from `hosts.machine`) and `pid`."""
    return {"host": this_host(), "machine": hosts.machine(), "pid": os.getpid()}


def in_words(rank: int, process: Mapping[str, Any]) -> str:
    """Names a rank whose process is known by its `this_process`."""
    return f"rank {rank} (host {process['host']}, pid {process['pid']})"


def _is_over(pid: int) -> bool:
    """Returns whether a process that has come has ended, or has become this one with another program."""
    return pid == os.getpid() or _has_ended(pid)


def _has_ended(pid: int) -> bool:
    try:
        # The fields after the command's name, which is in brackets and may hold anything.
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


class Arrivals:
    """Knows from the launcher's store which ranks have come to one start, or imported smp_tf.

    Args:
        environment: the variables in which the launcher says how many ranks there are, and where it is.
        imported: whether it is about the import and not about the next start.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ, imported: bool = False) -> None:
        self._start = _IMPORT if imported else next(_starts)
        self._size, self._rank = world_size(environment), world_rank(environment)
        address, port = environment.get(_ADDRESS), number([_PORT], environment)
        self._store = (address, port) if self._size > 1 and address and port else None
        # horovodrun numbers the ranks of a host without a gap.
        first = self._rank - number([_LOCAL_RANK], environment)
        self._here = range(first, first + number([_LOCAL_SIZE], environment, 1))
        # The ranks that have come, and others that have imported smp_tf.
        self._known: dict[int, dict[str, Any]] = {}
        self._come: set[int] = set()
        self._entered = False

    @property
    def are_known(self) -> bool:
        """Returns whether there is a store to ask."""
        return self._store is not None

    def enter(self) -> None:
        """Notes in the store that this rank has come."""
        with contextlib.suppress(_NoAnswerError):
            self._leave(time.monotonic() + _ASKING_TIME)

    def enter_first(self) -> bool:
        """Notes that this rank has come, unless it runs as another process. Returns whether it did."""
        deadline = time.monotonic() + _ASKING_TIME
        with contextlib.suppress(_NoAnswerError):
            # Programs that a rank starts have its variables. The rank itself may have begun as a program that has
            # ended.
            other = self._said(self._start, self._rank, deadline)
            if other is None or (other["machine"] == hosts.machine() and _is_over(other["pid"])):
                self._leave(deadline)
        return self._entered

    def fail(self) -> None:
        """Notes that this rank ends by itself. Others may hear of it while its process still lives."""
        with contextlib.suppress(_NoAnswerError):
            self._leave(time.monotonic() + _ASKING_TIME, **{_FAILS: True})

    def met(self, processes: Sequence[Mapping[str, Any]]) -> None:
        """Notes that all ranks have met, so that the store need not be asked any more.

        Args:
            processes: the results of `this_process`, in rank order.
        """
        self._known.update(enumerate(map(dict, processes)))
        self._come.update(self._known)

    def missing(self, seconds: float = _ASKING_TIME) -> list[int] | None:
        """Returns ranks that have not come, up to a number of them; None where this cannot be known.

        Args:
            seconds: the most seconds to ask for.
        """
        deadline = time.monotonic() + seconds
        missing: list[int] = []
        # Ranks of this host come first, since it is known where they are to run.
        others = (rank for rank in range(self._size) if rank not in self._here)
        try:
            if not self._entered:
                # A rank that the others do not find is called missing.
                self._leave(deadline)
            for rank in (*self._here, *others):
                if len(missing) == _MOST_NAMES or time.monotonic() > deadline:
                    break
                if not self._has_come(rank, deadline):
                    self._look_up(rank, deadline)
                    missing.append(rank)
        except _NoAnswerError:
            return None
        return sorted(missing)

    def lost(self) -> list[str]:
        """Returns words for the ranks on this machine that have ended, or end, but not because of another rank.

        A rank that is about to end has a moment to do so. The others learn that this rank is about to end because of
        it.
        """
        return self._lost(time.monotonic() + _ENDING_TIME, _LOST_TIME)

    def whose_end(self) -> str:
        """Returns words for why the launcher ends this rank, as far as known, to follow "was ended in smp.init"."""
        deadline = time.monotonic() + _ENDING_TIME
        # It looks at once, since the launcher also ends other ranks.
        if lost := self._lost(deadline, 0.0):
            return f": {' and '.join(lost)} had ended"
        if self._start == _IMPORT:
            if unheard := self._names_of(self.missing(deadline - time.monotonic()) or []):
                return f": it had not heard of {unheard}"
        elif missing := self.missing_in_words(deadline - time.monotonic()):
            return f": it waited for {missing}"
        if silent := self._silent(deadline):
            return f": {' and '.join(silent)} had ended, or did not know yet of the end"
        return ""

    def in_words(self, rank: int) -> str:
        """Names a rank, with its host where it is known."""
        if rank in self._known:
            return in_words(rank, self._known[rank])
        if rank in self._here:
            return f"rank {rank} (host {this_host()})"
        for other in list(self._known.values()):
            first, stop = other["ranks of its host"]
            if rank in range(first, stop):
                return f"rank {rank} (host {other['host']})"
        return f"rank {rank}"

    def missing_in_words(self, seconds: float = _ASKING_TIME) -> str:
        """Returns words for the ranks that have not come; "" where none is known."""
        missing = self.missing(seconds) or []
        names = self._names_of(missing)
        return f"{names}, which {'have' if len(missing) > 1 else 'has'} not come to it" if names else ""

    def _names_of(self, ranks: Sequence[int]) -> str:
        return ", ".join(map(self.in_words, ranks)) + (" and others" if len(ranks) == _MOST_NAMES else "")

    def _lost(self, deadline: float, moment: float) -> list[str]:
        with contextlib.suppress(_NoAnswerError):
            self._leave(deadline, **{_FOLLOWS: True})
            for rank in self._here:
                self._look_up(rank, deadline)
        machine = hosts.machine()
        here = {rank: process for rank, process in sorted(self._known.items()) if process["machine"] == machine}
        until = time.monotonic() + moment
        while True:
            ended = {rank for rank, process in here.items() if _has_ended(process["pid"])}
            for rank in ended:
                shared_memory.remove_left_by(here[rank]["pid"])
            found = [
                in_words(rank, process)
                for rank, process in here.items()
                if (not self._follows(rank, deadline) if rank in ended else self._fails(rank, deadline))
            ]
            if found or time.monotonic() >= until:
                return found
            time.sleep(_PAUSE)

    def _silent(self, deadline: float) -> list[str]:
        """Returns the ranks of other machines that have come and did not say in time that they end because of another.

        This machine cannot see whether their processes have ended. Those that have not are ended as this one is.
        """
        machine = hosts.machine()
        silent = [rank for rank, process in sorted(self._known.items()) if process["machine"] != machine]
        until = min(deadline, time.monotonic() + _LOST_TIME)
        while True:
            silent = [rank for rank in silent if not self._follows(rank, deadline)]
            if not silent or time.monotonic() >= until:
                return [self.in_words(rank) for rank in silent[:_MOST_NAMES]]
            time.sleep(0.01)

    def _follows(self, rank: int, deadline: float) -> bool:
        """Returns whether a rank has noted, or may have noted, that another is the cause. The store may be gone."""
        if self._store is None:
            return False
        try:
            said = self._said(_IMPORT, rank, deadline)
        except _NoAnswerError:
            return True
        return said is not None and _FOLLOWS in said

    def _fails(self, rank: int, deadline: float) -> bool:
        """Returns whether a rank that still runs has noted that it ends by itself."""
        if rank == self._rank:
            return False
        with contextlib.suppress(_NoAnswerError):
            said = self._said(_IMPORT, rank, deadline)
            return said is not None and _FAILS in said
        return False

    def _has_come(self, rank: int, deadline: float) -> bool:
        if rank not in self._come:
            said = self._said(self._start, rank, deadline)
            if said is not None:
                self._known[rank] = said
                self._come.add(rank)
        return rank in self._come

    def _look_up(self, rank: int, deadline: float) -> None:
        """Learns which process a rank is, if it has come or imported smp_tf."""
        if self._has_come(rank, deadline) or rank in self._known:
            return
        said = self._said(_IMPORT, rank, deadline)
        if said is not None:
            self._known[rank] = said

    def _leave(self, deadline: float, **more: object) -> None:
        said = {**this_process(), "ranks of its host": [self._here.start, self._here.stop], **more}
        # A rank that imports smp_tf, or starts, notes there as what it runs, and because of whom it ends.
        for start in sorted({_IMPORT, self._start}):
            self._ask("PUT", start, self._rank, deadline, json.dumps(said).encode())
        self._entered = True

    def _said(self, start: int, rank: int, deadline: float) -> dict[str, Any] | None:
        """Returns a rank's note in a start; None where it has left none."""
        answer = self._ask("GET", start, rank, deadline)
        try:
            said = json.loads(answer) if answer else None
        except (ValueError, RecursionError) as error:
            raise _NoAnswerError from error
        if said is not None and not _is_process(said):
            # Another program may have the port by now, and say something else.
            raise _NoAnswerError
        return said

    def _ask(self, method: str, start: int, rank: int, deadline: float, body: bytes | None = None) -> bytes:
        """Returns what the store has of a rank in a start; b"" where it has nothing."""
        left = deadline - time.monotonic()
        if self._store is None or left <= 0.0:
            raise _NoAnswerError
        asking = http.client.HTTPConnection(*self._store, timeout=left)
        try:
            asking.request(method, f"/smp_tf.{start}/{rank}", body)
            answer = asking.getresponse()
            return answer.read() if answer.status == http.client.OK else b""
        except (OSError, http.client.HTTPException, ValueError, OverflowError) as error:
            # This includes impossible hosts and ports.
            raise _NoAnswerError from error
        finally:
            asking.close()


def _is_process(said: Any) -> bool:
    """Returns whether a value may be a rank's note on its process: all fields are there with their types."""
    if not isinstance(said, dict):
        return False
    host, machine, pid = (said.get(name) for name in ("host", "machine", "pid"))
    ranks = said.get("ranks of its host")
    return (
        isinstance(host, str)
        and host.isprintable()
        and isinstance(machine, str)
        and type(pid) is int
        and pid > 0
        and isinstance(ranks, list)
        and len(ranks) == 2
        and all(type(rank) is int for rank in ranks)
    )


class _NoAnswerError(Exception):
    """There is no store, or it does not answer in time."""
