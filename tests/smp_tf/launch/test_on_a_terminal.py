"""`smp-tf run` on a terminal: rank 0 has one, too, which is narrower by the mark and follows its size."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import os, shutil, sys, threading
rank = os.environ["HOROVOD_RANK"]
print(sys.stdout.isatty(), sys.stderr.isatty(), shutil.get_terminal_size((80, 24)).columns)
if rank == "0":
    sys.stdout.write("1/2")
    sys.stderr.write("\\n")
    sys.stdout.write("\\b\\b\\b\\r2/2\\n")
    print("\\x1b[32mgreen\\x1b[0m")
if len(sys.argv) > 1:
    width = os.get_terminal_size(1).columns if rank == "0" else 0
    if rank == "0":
        print("ready")
        while os.get_terminal_size(1).columns == width:
            os.sched_yield()
        print("now", os.get_terminal_size(1).columns)
"""


class OnTerminal:
    """`smp-tf run` on a terminal of 60 columns."""

    def __init__(self, folder: Path, *arguments: str, log_dir: bool = False) -> None:
        (folder / "job.py").write_text(SCRIPT)
        words = [sys.executable, "-m", "smp_tf.command.main", "run", "-np", "2"]
        words += [*(["--log-dir", "logs"] if log_dir else []), "job.py", *arguments]
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
        environment |= {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 60, 0, 0))
            os.chdir(folder)
            os.execve(sys.executable, words, environment)
        self._unread = ""

    def until(self, text: str) -> str:
        """Returns what is shown up to a text."""
        while text not in self._unread:
            self._unread += os.read(self.terminal, 1 << 16).decode()
        before, _, self._unread = self._unread.partition(text)
        return before

    def end(self) -> str:
        """Returns what else is shown."""
        shown = self._unread
        while True:
            try:
                data = os.read(self.terminal, 1 << 16)
            except OSError:
                data = b""
            if not data:
                break
            shown += data.decode()
        assert os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) == 0
        os.close(self.terminal)
        return shown


@pytest.fixture(autouse=True)
def default_signals() -> Iterator[None]:
    before = signal.signal(signal.SIGWINCH, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGWINCH, before)


def test_rank_0_has_a_terminal_and_marks_have_colors(tmp_path: Path) -> None:
    shown = OnTerminal(tmp_path, log_dir=True).end()
    first, second = "\x1b[36m[0]\x1b[0m ", "\x1b[35m[1]\x1b[0m "
    assert f"{first}True True 56\r\n" in shown
    assert f"{second}False False 80\r\n" in shown
    # In its file there are no colors, although it writes some.
    assert "green\n" in (tmp_path / "logs/rank_0.log").read_text()
    assert "\x1b[32mgreen\x1b[0m" in shown
    assert f"\b\b\b\r{first}2/2\r\n" in shown or f"{first}2/2\r\n" in shown


def test_the_terminal_of_rank_0_follows_the_size(tmp_path: Path) -> None:
    job = OnTerminal(tmp_path, "resize")
    job.until("ready")
    fcntl.ioctl(job.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 90, 0, 0))
    job.until("now 86")
    job.end()
