"""Runs the set-up's commands. Their output goes to the log, and a moving line to the screen."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from setup_prerequisites import SetupFailure
from setup_state import ChildRecord, end_group

SPINNER = "|/-\\"
HEARTBEAT_SECONDS = 30
TAIL_BYTES = 32 * 1024
COMPILED_SHARE = re.compile(r"\[ *\d+%\]")

NO_REGISTRY = re.compile(
    r"Temporary failure in name resolution|Name or service not known|NameResolutionError"
    r"|Failed to establish a new connection|Network is unreachable|Connection refused"
    r"|ConnectTimeoutError|Cannot connect to proxy"
)
KNOWN_CAUSES = (
    (
        re.compile(r"No space left on device"),
        "the disk is full; free about 4 GB (`df -h .`)",
    ),
    (
        re.compile(r"fatal error: Killed signal|c\+\+: fatal error: Killed"),
        "the compiler was killed, most likely for lack of memory; try MAKEFLAGS=-j1 make setup",
    ),
    (
        re.compile(r"CERTIFICATE_VERIFY_FAILED"),
        "the pip registry's certificate is not trusted. Install: sudo apt-get install ca-certificates",
    ),
    (
        NO_REGISTRY,
        "no pip registry can be reached. Check the network, or name another registry: "
        "export PIP_INDEX_URL=https://HOST/simple",
    ),
)
# Patterns of errors of a compiler, CMake, Python programs and pip. The first one that is found tells most.
CAUSE_LINES = (
    re.compile(r"^.*:\d+:\d+: (?:fatal )?error: .*", re.MULTILINE),
    re.compile(r"^CMake Error.*", re.MULTILINE),
    re.compile(r"^\s*[\w.]*(?:Error|Exception|Exit): .*", re.MULTILINE),
    re.compile(r"^\s*error: (?!subprocess-exited-with-error).*", re.MULTILINE),
    re.compile(r"^ERROR: .*", re.MULTILINE),
)


def cause_of(output: str) -> str:
    """Finds the one line that tells why in a failed command's output.

    Args:
        output: what the command printed.

    Returns:
        The cause: for a known failure with what to do; else the first error of the compiler, CMake, pip or Python.
    """
    for pattern, cause in KNOWN_CAUSES:
        if pattern.search(output):
            return cause
    for pattern in CAUSE_LINES:
        found = pattern.search(output)
        if found:
            return found.group().strip()
    lines = output.strip().splitlines()
    return lines[-1].strip() if lines else "it printed nothing"


def duration(seconds: float) -> str:
    """Returns a time as a person says it: `7 s`, `2 min 05 s`."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60:02d} s"


class Progress:
    """Shows numbered steps with their time, and keeps the log.

    On a terminal the running step is one moving line with the newest line of the log. Elsewhere a step prints a line
    when it starts, every 30 seconds, and when it ends.
    """

    def __init__(self, log: Path, child: ChildRecord) -> None:
        """Args: log: the log file, added to. child: where the running command is recorded."""
        self.log = log
        self._file = open(log, "ab", buffering=0)  # noqa: SIM115 - open to the end
        self._child = child
        self._moving = sys.stdout.isatty()
        self._title = ""
        self._began = 0.0
        self._beat = 0.0
        self._turn = 0

    def say(self, text: str) -> None:
        """Prints a line that stays, and logs it."""
        self._file.write(f"=== {text}\n".encode())
        print(f"{self._erase()}{text}", flush=True)

    def _erase(self) -> str:
        return "\r\x1b[K" if self._moving else ""

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Shows one step from its start to its end.

        Args:
            title: such as `[2/5] compile Horovod 0.28.1`.
        """
        self._title, self._began = title, time.monotonic()
        self._beat = self._began
        self._file.write(f"=== {time.strftime('%F %T')} {title}\n".encode())
        if not self._moving:
            print(f"{title} ...", flush=True)
        yield
        self.say(f"{title}: {duration(time.monotonic() - self._began)}")

    def move(self, detail: str) -> None:
        """Shows that the running step is alive. Call it several times a second."""
        now = time.monotonic()
        text = f"{self._title} {duration(now - self._began)}  {detail}"
        if self._moving:
            self._turn += 1
            width = shutil.get_terminal_size().columns
            line = f"{SPINNER[self._turn % len(SPINNER)]} {text}"
            print(f"{self._erase()}{line[: width - 1]}", end="", flush=True)
        elif now - self._beat >= HEARTBEAT_SECONDS:
            self._beat = now
            print(f"  {text[:160]}", flush=True)

    def run(self, command: Sequence[str | Path], env: Mapping[str, str], cwd: Path) -> None:
        """Runs one command of a step, in a process group of its own.

        Args:
            command: the program and its arguments.
            env: its whole environment.
            cwd: the folder that it runs in.

        Raises:
            SetupFailure: it failed. The message is the cause found in its output.
        """
        self._file.write(f"+ {' '.join(map(str, command))}\n".encode())
        start = self.log.stat().st_size
        process = subprocess.Popen(
            command,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._child.note(process.pid)
        try:
            while True:
                try:
                    status = process.wait(timeout=0.1)
                    break
                except subprocess.TimeoutExpired:
                    self.move(self._newest_line(start))
        except BaseException:
            end_group(process.pid)
            raise
        finally:
            self._child.forget()
        if status != 0:
            output = self.log.read_bytes()[start:].decode(errors="replace")
            raise SetupFailure(f"{self._title}: {cause_of(output)}")

    def _newest_line(self, start: int) -> str:
        with open(self.log, "rb") as file:
            file.seek(max(start, self.log.stat().st_size - TAIL_BYTES))
            lines = re.split(r"[\r\n]+", file.read().decode(errors="replace").strip())
        # Who waits does not need a compiler's warnings, but how far it has come.
        shares = [line for line in lines if COMPILED_SHARE.match(line.strip())]
        return re.sub(r"[^ -~]", "", (shares or lines)[-1]).strip()
