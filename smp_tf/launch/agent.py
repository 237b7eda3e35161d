"""Runs the ranks of one host, for a launcher that may be on another host.

    ┌──────────┐ ── lines of JSON: what to run, "end", "kill" ─▶ ┌───────┐ ──▶ rank 0   each in a session of its own
    │ launcher │                                                 │ agent │
    └──────────┘ ◀─ frames: output, ends ─────────────────────── └───────┘ ──▶ rank 1

Its standard input ends with the launcher, and then the ranks end, too. When the agent itself is killed, the system
kills its ranks. It never waits for a reader: what nobody reads yet is kept, and above a limit no more is read.

It is started as a file, without what is installed (`python -I -S`), so that it is there within some hundredths of a
second. So it imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: What an agent says first. A shell that greets its user may have written something before.
GREETING = b"\0smp_tf agent\n"
#: Kinds of frames: a rank's process is there, wrote to one of its outputs, has ended, or could not be started.
STARTED, OUT, ERR, ENDED, TROUBLE = range(5)
#: The rank in a frame that is about the host.
NO_RANK = -1

_HEAD = struct.Struct("!BiI")
_LIBC = ctypes.CDLL(None, use_errno=True)
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR
_ANY_PORT = 9
_AT_ONCE = 1 << 16
#: More than a pipe or a terminal holds.
_MOST_READS = 32
#: Bytes that wait for the launcher above which no more output is read.
_MOST_WAITING = 1 << 20


@dataclass(frozen=True)
class Frame:
    """What an agent says of a rank.

    Args:
        kind: STARTED, OUT, ERR, ENDED or TROUBLE.
        rank: of the job; NO_RANK for the host.
        content: output as it is; of STARTED the process number, of ENDED the status as `subprocess` gives it (negative:
            the signal), of TROUBLE words, each in ASCII or UTF-8.
    """

    kind: int
    rank: int
    content: bytes

    def packed(self) -> bytes:
        """Returns the frame as bytes."""
        return _HEAD.pack(self.kind, self.rank, len(self.content)) + self.content


class FrameReader:
    """Finds frames in what comes from an agent, and drops what stands before its greeting."""

    def __init__(self) -> None:
        self._data = bytearray()
        self.is_greeted = False

    def frames(self, data: bytes) -> Iterator[Frame]:
        """Yields the frames that are complete.

        Args:
            data: what came after the last call.
        """
        self._data += data
        if not self.is_greeted:
            _, found, rest = bytes(self._data).partition(GREETING)
            if not found:
                return
            self.is_greeted, self._data = True, bytearray(rest)
        while len(self._data) >= _HEAD.size:
            kind, rank, length = _HEAD.unpack_from(self._data)
            if len(self._data) < _HEAD.size + length:
                return
            content = bytes(self._data[_HEAD.size : _HEAD.size + length])
            del self._data[: _HEAD.size + length]
            yield Frame(kind, rank, content)


@dataclass
class _Rank:
    """A rank that runs.

    Args:
        number: its rank in the job.
        process: its process.
        outputs: the descriptors of its outputs, and the kind of frame for each.
        terminals: those of them that are terminals.
    """

    number: int
    process: subprocess.Popen[bytes]
    outputs: dict[int, int] = field(default_factory=dict)
    terminals: set[int] = field(default_factory=set)


class Agent:
    """Runs ranks until all have ended.

    Args:
        reading: the descriptor from which the launcher's lines come.
        writing: the descriptor for frames.
    """

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._selector = selectors.DefaultSelector()
        self._lines = b""
        self._waiting = bytearray(GREETING)
        self._is_heard = True
        self._is_reading_ranks = True
        self._has_job = False
        self._ranks: dict[int, _Rank] = {}
        self._grace = 0.0
        self._is_ending = False
        self._kill_at: float | None = None

    def run(self) -> None:
        """Runs what the launcher asks for, and returns when nothing of it is left."""
        for descriptor in (self._reading, self._writing):
            os.set_blocking(descriptor, False)
        self._hear_signals()
        self._selector.register(self._reading, selectors.EVENT_READ, self._read_launcher)
        self._flush()
        while self._is_wanted():
            left = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
            for key, _ in self._selector.select(left):
                key.data()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill_at = None
                self._kill()

    def _is_wanted(self) -> bool:
        if self._ranks or (self._waiting and self._is_heard):
            return True
        return self._is_heard and not self._has_job

    def _hear_signals(self) -> None:
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        # A handler wakes the loop. What is ignored stays so, also in the ranks.
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGCHLD:
                signal.signal(number, lambda *_: None)

        def on_signal() -> None:
            numbers = os.read(reading, _AT_ONCE)
            if any(number != signal.SIGCHLD for number in numbers):
                self._end()
            self._look_for_ends()

        self._selector.register(reading, selectors.EVENT_READ, on_signal)

    def _read_launcher(self) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = os.read(self._reading, _AT_ONCE)
        if not data:
            self._selector.unregister(self._reading)
            self._lose_launcher()
            return
        *lines, self._lines = (self._lines + data).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))

    def _lose_launcher(self) -> None:
        """Notes that nobody hears the agent any more, and ends the ranks."""
        if self._is_heard:
            self._is_heard = False
            self._waiting.clear()
            self._watch_writing()
            self._end()

    def _obey(self, asked: Mapping[str, Any]) -> None:
        if "ranks" in asked:
            self._has_job = True
            self._start(asked)
        elif "size" in asked:
            for rank in self._ranks.values():
                for terminal in rank.terminals:
                    _set_size(terminal, asked["size"])
        elif "end" in asked:
            self._end()
        else:
            self._kill()

    def _start(self, job: Mapping[str, Any]) -> None:
        self._grace = job["grace"]
        try:
            interface = chosen_interface(job["interface"], job["peer"])
        except OSError as error:
            self._say(Frame(TROUBLE, NO_RANK, f"{error.filename}: {error.strerror}".encode()))
            return
        environment = {**os.environ, **job["environment"]}
        environment |= {name: interface for name in job["interface variables"]}
        for rank in job["ranks"]:
            try:
                self._start_rank(job, rank, {**environment, **rank["environment"]})
            except OSError as error:
                words = f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)
                self._say(Frame(TROUBLE, rank["rank"], words.encode(errors="replace")))

    def _start_rank(self, job: Mapping[str, Any], asked: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        ends = [_output(asked[name]) for name in ("out", "err")]
        try:
            process = subprocess.Popen(
                job["command"],
                cwd=job["folder"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=ends[0][1],
                stderr=ends[1][1],
                start_new_session=True,
                preexec_fn=functools.partial(_die_with_parent, os.getpid()),
            )
        except BaseException:
            for reading, _ in ends:
                os.close(reading)
            raise
        finally:
            for _, writing in ends:
                os.close(writing)
        rank = _Rank(asked["rank"], process)
        self._ranks[rank.number] = rank
        self._say(Frame(STARTED, rank.number, b"%d" % process.pid))
        for (reading, _), kind, name in zip(ends, (OUT, ERR), ("out", "err"), strict=True):
            os.set_blocking(reading, False)
            rank.outputs[reading] = kind
            if asked[name] is not None:
                rank.terminals.add(reading)
            if self._is_reading_ranks:
                self._selector.register(reading, selectors.EVENT_READ, self._reader(rank, reading))

    def _reader(self, rank: _Rank, descriptor: int) -> Callable[[], object]:
        return lambda: self._read_rank(rank, descriptor)

    def _read_rank(self, rank: _Rank, descriptor: int) -> bool:
        """Passes on what a rank wrote. Returns whether there may be more."""
        kind = rank.outputs.get(descriptor)
        if kind is None:
            return False
        try:
            data = os.read(descriptor, _AT_ONCE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""  # the other end of a terminal is closed
        if data:
            self._say(Frame(kind, rank.number, data))
            return True
        self._close(rank, descriptor)
        return False

    def _close(self, rank: _Rank, descriptor: int) -> None:
        del rank.outputs[descriptor]
        rank.terminals.discard(descriptor)
        with contextlib.suppress(KeyError):
            self._selector.unregister(descriptor)
        os.close(descriptor)

    def _look_for_ends(self) -> None:
        for rank in list(self._ranks.values()):
            pid = rank.process.pid
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            # The number is the rank's until it is waited for.
            _kill_session(pid)
            for descriptor in list(rank.outputs):
                # What has left the session may go on writing.
                for _ in range(_MOST_READS):
                    if not self._read_rank(rank, descriptor):
                        break
                if descriptor in rank.outputs:
                    self._close(rank, descriptor)
            del self._ranks[rank.number]
            self._say(Frame(ENDED, rank.number, b"%d" % rank.process.wait()))

    def _end(self) -> None:
        """Lets all ranks end, once, however often it is asked for: a second SIGTERM may end what saves its state."""
        if self._is_ending or not self._ranks:
            return
        self._is_ending = True
        self._kill_at = time.monotonic() + self._grace
        for rank in self._ranks.values():
            rank.process.terminate()

    def _kill(self) -> None:
        for rank in self._ranks.values():
            _kill_session(rank.process.pid)

    def _say(self, frame: Frame) -> None:
        if self._is_heard:
            self._waiting += frame.packed()
            self._flush()

    def _flush(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: os.write(self._writing, self._waiting[:_AT_ONCE])]
        except BlockingIOError:
            pass
        except OSError:
            self._lose_launcher()
        self._watch_writing()

    def _watch_writing(self) -> None:
        """Waits for room where something waits for the launcher, and reads from ranks only while little does."""
        is_watched = self._writing in self._selector.get_map()
        if self._waiting and not is_watched:
            self._selector.register(self._writing, selectors.EVENT_WRITE, self._flush)
        elif is_watched and not self._waiting:
            self._selector.unregister(self._writing)
        if self._is_reading_ranks == (len(self._waiting) <= _MOST_WAITING):
            return
        self._is_reading_ranks = not self._is_reading_ranks
        for rank in self._ranks.values():
            for descriptor in rank.outputs:
                if self._is_reading_ranks:
                    self._selector.register(descriptor, selectors.EVENT_READ, self._reader(rank, descriptor))
                else:
                    self._selector.unregister(descriptor)


def chosen_interface(name: str | None, peer: str | None) -> str:
    """Returns the network interface over which ranks speak.

    Args:
        name: the one that the user has named; None for the one that leads to the other host.
        peer: name or address of the other host; None where there is none.

    Raises:
        OSError: there is no such interface or no such host, which is the error's `filename`, or no way to it.
    """
    if name is None and peer is not None:
        try:
            return interface_towards(peer)
        except OSError as error:
            raise OSError(error.errno, error.strerror, peer) from error
    if name is None or name not in (found for _, found in socket.if_nameindex()):
        raise OSError(0, "there is no such network interface", name)
    return name


def interface_towards(peer: str) -> str:
    """Returns the network interface over which this host reaches another one.

    Args:
        peer: name or address of the other host.

    Raises:
        OSError: there is no such host, or no way to it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        # Nothing is sent. The system only looks for the way.
        trial.connect((peer, _ANY_PORT))
        address = socket.inet_aton(trial.getsockname()[0])
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):
                if fcntl.ioctl(trial, _ADDRESS_OF_INTERFACE, asked)[20:24] == address:
                    return name
    raise OSError(0, f"no network interface of this host has the address {socket.inet_ntoa(address)}")


def _output(size: Sequence[int] | None) -> tuple[int, int]:
    """Returns the two ends of an output of a rank: a pipe, or a terminal of a size (rows, columns)."""
    if size is None:
        return os.pipe()
    reading, writing = os.openpty()
    mode = termios.tcgetattr(writing)
    mode[1] &= ~termios.OPOST  # line ends stay as they are written
    termios.tcsetattr(writing, termios.TCSANOW, mode)
    _set_size(reading, size)
    return reading, writing


def _set_size(terminal: int, size: Sequence[int]) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))


def _die_with_parent(parent: int) -> None:
    """Lets the system kill this process when its parent ends."""
    _LIBC.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _kill_session(leader: int) -> None:
    """Kills a rank and what it has started, except what has left its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


if __name__ == "__main__":
    Agent(0, 1).run()
