"""One job: the processes that `horovodrun -np N` starts, watched from start to end.

    Job ── horovodrun ──┬── rank 0 ── rank-0.pipe ──┐
         (its own pipe) └── rank 1 ── rank-1.pipe ──┴─▶ lines, in order of arrival ─▶ on_line()

Nothing here sleeps: the watch wakes on a line, on the end of a process, or at the deadline. At the
deadline every rank prints its stacks, and the whole tree is killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.distributed import left_behind
from tests.distributed.rank_main import HELLO
from tests.distributed.warm_process import WarmProcess, may_be_forked

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = -1
#: Seconds that only what hangs takes, also on a machine that does much else; nobody waits so long for what passes.
DEADLINE = 240.0
#: Folders of this process's jobs, each with the test that made it.
_folders: list[tuple[str, Path]] = []
WARM = WarmProcess()
_EXIT = re.compile(r"Process (\d+) exit with status code (\d+)\.")


def running_test() -> str:
    """The id of the test that pytest runs in this process; "" where it runs none."""
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]


def delete_folders(failed: Collection[str], folders: list[tuple[str, Path]] = _folders) -> None:
    """Deletes what jobs have left in their folders, when the test session ends.

    Args:
        failed: ids of the tests whose folders stay.
        folders: each with the test that made it.
    """
    for test, folder in folders:
        if test not in failed:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Line:
    """A line of output: when it arrived (monotonic seconds), from which rank, and its text."""

    at: float
    rank: int
    text: str


@dataclass
class Outcome:
    """How a job went.

    Attributes:
        returncode: the launcher's exit status (negative: the signal that ended it).
        exit_codes: per rank, 128 + signal when a signal ended it, None when horovodrun did not
            say it (it ended the rank after another's failure, or was killed itself).
        ended_at: per rank, monotonic seconds of its end, None for a rank that never started.
        lines: all lines, the launcher's too, in order of arrival.
        timed_out: the deadline passed; `lines` then holds every rank's stacks.
        left_behind: what still existed after the end, in words; empty when all is clean.
        seconds: from start to the end of the last process.
        folder: the job's folder, deleted when the test session ends unless the test failed.
    """

    command: list[str]
    returncode: int
    exit_codes: list[int | None]
    ended_at: list[float | None]
    lines: list[Line]
    timed_out: bool
    left_behind: list[str]
    seconds: float
    folder: Path

    def output(self, rank: int) -> str:
        """Returns all that one rank printed, both streams (LAUNCHER: what horovodrun printed)."""
        return "\n".join(line.text for line in self.lines if line.rank == rank)

    def line_with(self, text: str, rank: int | None = None) -> Line | None:
        """Returns the first line that contains the text, of one rank or of any."""
        for line in self.lines:
            if text in line.text and rank in (None, line.rank):
                return line
        return None

    def report(self) -> str:
        """Returns everything a person needs to see why a job failed, per rank."""
        out = [f"command: {' '.join(self.command)}"]
        out.append(
            f"launcher exit {self.returncode}, ranks exit {self.exit_codes}, {self.seconds:.1f} s"
            + (", DEADLINE PASSED" if self.timed_out else "")
        )
        out += [f"left behind: {thing}" for thing in self.left_behind]
        out.append(f"the job's folder: {self.folder}")
        for rank in range(len(self.exit_codes)):
            out += [f"──── rank {rank} ────", self.output(rank)]
        out += ["──── launcher ────", self.output(LAUNCHER)]
        return "\n".join(out)

    def expect_clean(self) -> Outcome:
        """Returns itself, or fails with the report if anything but a clean end was seen."""
        if self.returncode != 0 or self.timed_out or self.left_behind:
            raise AssertionError(self.report())
        return self

    def forget(self) -> None:
        """Deletes the job's folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass
class Job:
    """A running job; `watch()` runs it to its end.

    Args:
        size: number of processes.
        script: the Python script that every rank runs.
        arguments: its command line.
        environment: variables added to this process's own; an empty one is taken away.
        deadline: seconds after which the job is stopped with its stacks printed. `expires_at`
            may be moved by `on_line` while the job runs.
        on_line: called with (job, line) for every line; it may send signals.
        launched: False starts one plain `python script` with no launcher.
        hosts: of this machine, what `-H` is given; "" leaves it out.
        as_installed: use the installed horovodrun, which looks for seconds what it was built with.
        cold: import TensorFlow in each rank, which are otherwise forked from a process that has (`warm_process.py`).
        patience: seconds that processes have to end after launcher and ranks, and two more; what is there then is left
            behind.
    """

    size: int
    script: Path
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    deadline: float = DEADLINE
    on_line: Callable[[Job, Line], None] | None = None
    launched: bool = True
    hosts: str = ""
    as_installed: bool = False
    cold: bool = False
    patience: float = 20.0

    def __post_init__(self) -> None:
        self.mark = uuid.uuid4().hex
        # A short folder: the path of a UNIX socket has 108 characters at most.
        self.folder = Path(tempfile.mkdtemp(prefix="smp-job-"))
        _folders.append((running_test(), self.folder))
        (self.folder / "tmp").mkdir()
        self.pids: dict[int, int] = {}
        self.lines: list[Line] = []
        self.timed_out = False
        self._ended: dict[int, float] = {}
        self._selector = selectors.DefaultSelector()
        self._partial: dict[int, bytes] = {}
        self._shared_before = left_behind.shared_memory_files()

    # ---- what on_line may do -------------------------------------------------------------------

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to one rank (LAUNCHER: to horovodrun, as Ctrl-C on a terminal does)."""
        os.kill(self._launcher.pid if rank == LAUNCHER else self.pids[rank], number)

    # ---- running -------------------------------------------------------------------------------

    def watch(self) -> Outcome:
        """Runs the job to its end and returns how it went."""
        self.start()
        self.follow()
        return self.finish()

    def start(self) -> None:
        """Starts the job's processes."""
        self.started_at = time.monotonic()
        self.expires_at = self.started_at + self.deadline
        with self._killed_on_error():
            self._start()

    def follow(self, until: Callable[[], bool] = lambda: False) -> None:
        """Handles events until the launcher and every rank that started have ended, or `until` says so.

        At the deadline all print their stacks and are killed.
        """
        with self._killed_on_error():
            while not until() and (LAUNCHER not in self._ended or set(self.pids) - set(self._ended)):
                remaining = self.expires_at - time.monotonic()
                if remaining <= 0:
                    self._stop_with_stacks()
                    return
                for key, _ in self._selector.select(remaining):
                    self._handle(key)

    @property
    def any_ended(self) -> bool:
        """Whether the launcher or a rank has been seen to end."""
        return bool(self._ended)

    def finish(self) -> Outcome:
        """Returns how a job went whose processes have ended; what is left of them is killed."""
        try:
            remaining = max(0.0, self.expires_at - time.monotonic())
            living = left_behind.wait_until_gone(self.mark, min(self.patience, remaining) + 2.0)
            self._drain()
        finally:
            left_behind.kill_all(self.mark)
            if hasattr(self, "_launcher"):
                self._launcher.wait()
        self._await_ends(living)
        seconds = time.monotonic() - self.started_at
        self._drain()
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()
        left = [f"process {pid}: {words}" for pid, words in living.items()]
        left += left_behind.shared_memory_left(self._shared_before)
        left += left_behind.sysv_segments_left(set(self.pids.values()))
        left += left_behind.sockets_left(self.folder)
        return Outcome(
            command=self._command,
            returncode=self._launcher.returncode,
            exit_codes=self._exit_codes(),
            ended_at=[self._ended.get(rank) for rank in range(self.size)],
            lines=self.lines,
            timed_out=self.timed_out,
            left_behind=[] if self.timed_out else left,
            seconds=seconds,
            folder=self.folder,
        )

    @contextlib.contextmanager
    def _killed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            left_behind.kill_all(self.mark)
            raise

    def _start(self) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTHONUNBUFFERED": "1",
            "TERM": "dumb",
            "TF_USE_LEGACY_KERAS": "1",
            "TF_ENABLE_ONEDNN_OPTS": "0",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
        if not self.as_installed:
            # Ranks look for work every millisecond else, also those that wait for cases: a third of the cores. At 20 ms
            # a waiting one still takes 3 % of a core.
            environment["HOROVOD_CYCLE_TIME"] = "60"
        if not (self.cold or self.as_installed) and may_be_forked(self.environment):
            environment.update(WARM.environment(environment))
        environment.update(
            {
                left_behind.MARK: self.mark,
                "SMP_TF_TEST_FOLDER": str(self.folder),
                "TMPDIR": str(self.folder / "tmp"),
            }
        )
        environment.update(self.environment)
        for name in [name for name, value in self.environment.items() if not value]:
            del environment[name]
        python = [sys.executable, str(ROOT / "tests/distributed/rank_main.py")]
        self._command = [*python, str(self.script), *self.arguments]
        if self.launched:
            installed = [str(Path(sys.executable).parent / "horovodrun")]
            quick = [sys.executable, str(ROOT / "tests/distributed/launcher/horovodrun"), "--gloo"]
            horovodrun = installed if self.as_installed else quick
            slots = ["-H", self.hosts] if self.hosts else []
            self._command = [*horovodrun, "-np", str(self.size), *slots, *self._command]
        for rank in range(self.size):
            pipe = self.folder / f"rank-{rank}.pipe"
            os.mkfifo(pipe)
            self._listen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), rank)
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self._listen(reading, LAUNCHER)
        self._launcher = subprocess.Popen(
            self._command,
            env=environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=writing,
            start_new_session=True,
        )
        os.close(writing)
        self._watch_process(self._launcher.pid, LAUNCHER)

    def _listen(self, descriptor: int, rank: int) -> None:
        self._partial[rank] = b""
        self._selector.register(descriptor, selectors.EVENT_READ, ("output", rank))

    def _watch_process(self, pid: int, rank: int) -> None:
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, ("process", rank))

    def _handle(self, key: selectors.SelectorKey) -> None:
        kind, rank = key.data
        if kind == "output":
            self._read(key.fd, rank)
            return
        self._ended[rank] = time.monotonic()
        self._close(key.fd)

    def _close(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)

    def _read(self, descriptor: int, rank: int) -> None:
        data = os.read(descriptor, 1 << 16)
        if not data:
            self._close(descriptor)
            data = b"\n" if self._partial[rank] else b""
        *whole, self._partial[rank] = (self._partial[rank] + data).split(b"\n")
        for text in whole:
            self._take(Line(time.monotonic(), rank, text.decode(errors="replace")))

    def _take(self, line: Line) -> None:
        if line.rank != LAUNCHER and line.text.startswith(HELLO):
            self.pids[line.rank] = int(line.text.removeprefix(HELLO))
            try:
                self._watch_process(self.pids[line.rank], line.rank)
            except ProcessLookupError:
                self._ended[line.rank] = line.at
            return
        self.lines.append(line)
        if self.on_line is not None:
            self.on_line(self, line)

    def _stop_with_stacks(self) -> None:
        """Lets every rank print its stacks, for as long as they keep printing, then kills all."""
        self.timed_out = True
        self.on_line = None
        for rank, pid in self.pids.items():
            if rank not in self._ended:
                try:
                    os.kill(pid, signal.SIGUSR1)
                except ProcessLookupError:
                    continue
        end = time.monotonic() + 5.0
        while time.monotonic() < end and (events := self._selector.select(1.0)):
            for key, _ in events:
                self._handle(key)
        left_behind.kill_all(self.mark)

    def _await_ends(self, living: Mapping[int, str]) -> None:
        """Handles the ends of all ranks that are gone: a process loses its mark a moment before its end is told."""
        until = time.monotonic() + 5.0
        while {rank for rank, pid in self.pids.items() if pid not in living} - set(self._ended):
            events = self._selector.select(max(0.0, until - time.monotonic()))
            if not events:
                return
            for key, _ in events:
                self._handle(key)

    def _drain(self) -> None:
        while events := self._selector.select(0):
            for key, _ in events:
                self._handle(key)

    def _exit_codes(self) -> list[int | None]:
        if not self.launched:
            code = self._launcher.returncode
            return [128 - code if code < 0 else code]
        told = {
            int(found[1]): int(found[2])
            for line in self.lines
            if line.rank == LAUNCHER and (found := _EXIT.search(line.text))
        }
        # horovodrun is silent about ranks that ended well, and about those that it ended itself.
        silent = 0 if self._launcher.returncode == 0 else None
        return [told.get(rank, silent) for rank in range(self.size)]
