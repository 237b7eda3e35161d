"""The launcher's end of an agent: starts it, here or on another host, and speaks with it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smp_tf.launch import agent
from smp_tf.launch.agent import Frame, FrameReader

_AT_ONCE = 1 << 16
_WORDS_KEPT = 20
#: Seconds that an agent, or the `ssh` that leads to it, has to end once it says nothing more.
_ENDING_TIME = 5.0


def agent_command() -> list[str]:
    """Returns the command that starts an agent, on any host with the same files."""
    return [sys.executable, "-I", "-S", str(Path(agent.__file__).resolve())]


class AgentLink:
    """Speaks with one agent.

    Args:
        command: what starts it: words, or a text for a shell.

    Attributes:
        outgoing: the descriptor of what it says.
        words: the descriptor of text that the agent, or `ssh`, prints.
        told: the latest of these words, line by line.
        living: the ranks that have begun and not ended.
        is_gone: whether its output has ended.
    """

    def __init__(self, command: Sequence[str] | str) -> None:
        # A session of its own: Ctrl-C on the terminal reaches the launcher alone.
        self._process = subprocess.Popen(
            command,
            shell=isinstance(command, str),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._incoming = self._process.stdin.fileno()
        self.outgoing = self._process.stdout.fileno()
        self.words = self._process.stderr.fileno()
        self.told: deque[str] = deque(maxlen=_WORDS_KEPT)
        self.living: dict[int, int] = {}
        self.is_gone = False
        self._reader = FrameReader()
        self._unsent: deque[bytes] = deque()
        self._is_sending = False

    @property
    def is_there(self) -> bool:
        """Returns whether the agent has begun."""
        return self._reader.is_greeted

    def send(self, message: Mapping[str, Any]) -> None:
        """Tells the agent something. Nothing happens where it has ended.

        Args:
            message: what it understands. That of a signal's handler comes after the one in whose midst it is called.
        """
        self._unsent.append(json.dumps(message).encode() + b"\n")
        if self._is_sending:
            return
        self._is_sending = True
        try:
            while self._unsent:
                line = self._unsent.popleft()
                while line:
                    line = line[os.write(self._incoming, line) :]
        except BrokenPipeError:
            self._unsent.clear()
        finally:
            self._is_sending = False

    def read(self) -> list[Frame]:
        """Returns what the agent has said. At its end `is_gone` becomes true."""
        data = os.read(self.outgoing, _AT_ONCE)
        self.is_gone = not data
        return list(self._reader.frames(data))

    def read_words(self) -> list[str]:
        """Returns lines of words; none at their end."""
        data = os.read(self.words, _AT_ONCE)
        lines = [line for line in data.decode(errors="replace").splitlines() if line.strip()]
        self.told += lines
        return lines if data else []

    def kill(self) -> None:
        """Kills the agent, or the `ssh` that leads to it. The ranks of a killed agent are killed by the system."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> int:
        """Leaves the agent, and returns how its process ended. An agent that still runs ranks is killed."""
        if not self.is_gone:
            self.kill()
        try:
            status = self._process.wait(_ENDING_TIME)
        except subprocess.TimeoutExpired:
            # An `ssh` may stay for something else on the other host.
            self.kill()
            status = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        return status
