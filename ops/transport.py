"""The point-to-point transport of this process, over the C library.

    transport = Transport.open(rank, size)          # every rank
    addresses = allgather(transport.address)        # the caller's business
    transport.connect(addresses, secret)            # secret: random bytes, the same on all ranks
    ...                                             # ops, send_bytes, recv_bytes
    transport.goodbye(); transport.close()

Settings of UCX itself (`UCX_TLS`, `UCX_NET_DEVICES`, `UCX_KEEPALIVE_INTERVAL`, `UCX_LOG_LEVEL`, ...) may be given in
the environment. They win over the ones chosen here.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from smp_tf.ops.errors import TransportError, TransportTimeoutError
from smp_tf.ops.plain_text import plain_text
from smp_tf.ops.transport_functions import (
    DEADLINE_EXCEEDED,
    INVALID_ARGUMENT,
    OK,
    MessageKey,
    Options,
    functions,
    raise_for,
)

__all__ = ["Transport", "TransportOptions"]

# A wait is made of slices, between which Python handles signals. So Ctrl-C works everywhere.
SLICE_S = 0.1
MESSAGE_PROGRAM = 0xFFFFFFFF00000000
#: Numbers of programs for messages between replicas within a step. No program of a stage has one of them.
REPLICA_PROGRAMS = range(1 << 48, 1 << 49)
MAX_CONTROL_BYTES = 4096
#: The end of the words for a receive that was withdrawn before its message came.
_WITHDRAWN = b" was withdrawn"


@dataclass(frozen=True)
class TransportOptions:
    """How the transport behaves.

    Attributes:
        single_host: Whether all ranks are on one host. Then only shared memory is opened, and no network port.
        local_size: Ranks on this host. The progress thread spins before it sleeps only when there are more cores than
            ranks.
        spin_us: Microseconds of spinning; -1 for 20 where there are spare cores, else 0.
        watch_launcher: Whether to end when the launcher (or, without one, the parent process) dies.
        watch_signals: Whether SIGINT and SIGTERM end all ranks, also inside TensorFlow. False leaves this to a later
            call of `Transport.watch_signals`.
        end_process: Whether to end a process that does not end by itself after a failure.
        read_memory: Whether to fetch large tensors of this host's ranks from their memory, in one copy, where the
            system lets us.
        huge_pages: Whether to move the memory of such tensors into huge pages, where the system has them.
        stall_report_s: Seconds after which a wait is reported.
        stall_timeout_s: Seconds after which a wait is a failure.
        grace_s: Seconds a process has to end by itself after a failure.
        network_devices: Network devices between hosts, as in UCX_NET_DEVICES; "" lets UCX choose.
    """

    single_host: bool = True
    local_size: int = 1
    spin_us: int = -1
    watch_launcher: bool = True
    watch_signals: bool = True
    end_process: bool = True
    read_memory: bool = True
    huge_pages: bool = True
    stall_report_s: float = 30.0
    stall_timeout_s: float = 1800.0
    grace_s: float = 4.0
    network_devices: str = ""


class Transport:
    """Connects this rank to every rank of the job. Thread-safe.

    Example:
        transport = Transport.open(rank, size)
        transport.connect(allgather(transport.address), secret)
        transport.send_bytes(1, tag=7, data=b"hello")
    """

    def __init__(self, handle: int, rank: int, size: int) -> None:
        """Wraps an open handle. Call `open` instead."""
        self._library = functions()
        # The library's part is freed with this object. So a thread that is in a call while another closes still has it.
        self._handle = handle
        self._free = weakref.finalize(self, self._library.smp_transport_release, handle)
        self._free.atexit = False
        self._why_closed = ""
        # A signal handler may send in the thread that it interrupts.
        self._lock = threading.RLock()
        self._sent: defaultdict[tuple[int, int], int] = defaultdict(int)
        #: Receives that were given up, by rank, tag and turn. The message of one may be on its way into its memory.
        self._on_their_way: dict[tuple[int, int, int], int] = {}
        self._received: defaultdict[tuple[int, int], int] = defaultdict(int)
        self.rank = rank
        self.size = size

    @classmethod
    def open(cls, rank: int, size: int, options: TransportOptions | None = None) -> Transport:
        """Opens the transport of this process, and makes the TensorFlow ops use it.

        Args:
            rank: This rank, from 0.
            size: Ranks of the job.
            options: How the transport behaves.

        Raises:
            TransportError: UCX could not be opened. The message says why.
        """
        library = functions()
        options = options or TransportOptions()
        c_options = Options()
        library.smp_options_init(ctypes.byref(c_options))
        for name in (
            "single_host",
            "local_size",
            "spin_us",
            "watch_launcher",
            "watch_signals",
            "end_process",
            "read_memory",
            "huge_pages",
            "stall_report_s",
            "stall_timeout_s",
            "grace_s",
        ):
            setattr(c_options, name, getattr(options, name))
        c_options.network_devices = options.network_devices.encode()
        error = ctypes.create_string_buffer(1024)
        handle = library.smp_transport_create(rank, size, ctypes.byref(c_options), error, len(error))
        if not handle:
            why = error.value.decode(errors="replace")
            # UCX's words for a lack of room for its segments.
            if any(words in why for words in ("Input/output error", "Out of memory", "Shared memory error")):
                why += ". Is there room in /dev/shm? See: df -h /dev/shm; docker run --shm-size=1g makes more"
            raise TransportError(f"rank {rank} could not open its transport: {why}")
        library.smp_transport_make_current(handle)
        transport = cls(handle, rank, size)
        _hook_forks()
        _transports.add(transport)
        atexit.register(transport._leave_at_exit)
        return transport

    def watch_signals(self) -> None:
        """Lets SIGINT and SIGTERM end all ranks from here on, also inside TensorFlow."""
        self._library.smp_transport_watch_signals(self._open_handle())

    @property
    def address(self) -> bytes:
        """Returns what the other ranks need to reach this one, some hundred bytes."""
        count = ctypes.c_size_t()
        data = self._library.smp_transport_address(self._open_handle(), ctypes.byref(count))
        return ctypes.string_at(data, count.value)

    def connect(
        self,
        addresses: Sequence[bytes],
        secret: bytes,
        timeout: float = 60.0,
        while_waiting: Callable[[str], None] | None = None,
    ) -> None:
        """Connects to all ranks, and returns when all of them have proved the secret.

        Args:
            addresses: The `address` of every rank, in rank order.
            secret: At least 16 random bytes, drawn for this job and known to its ranks only.
            timeout: Seconds to wait for all ranks.
            while_waiting: Called several times a second meanwhile, with words for the ranks that are waited for.

        Raises:
            ValueError: The addresses are not those of this job's ranks, in order.
            TransportTimeoutError: Some ranks did not connect. The message names them.
            PeerError: A rank was lost meanwhile.
        """
        if len(addresses) != self.size:
            raise ValueError(f"connect needs one address per rank, {self.size}. Received: {len(addresses)}")
        handle = self._open_handle()
        pointers = (ctypes.c_char_p * self.size)(*addresses)
        counts = (ctypes.c_size_t * self.size)(*(len(a) for a in addresses))
        error = ctypes.create_string_buffer(4096)
        code = self._library.smp_transport_connect(
            handle, pointers, counts, self.size, secret, len(secret), error, len(error)
        )
        if code == INVALID_ARGUMENT:
            raise ValueError(error.value.decode(errors="replace"))
        raise_for(code, error.value)
        deadline = time.monotonic() + timeout
        while True:
            left = max(0.0, min(SLICE_S, deadline - time.monotonic()))
            code = self._library.smp_transport_wait_connected(handle, left, error, len(error))
            if code != DEADLINE_EXCEEDED or time.monotonic() >= deadline:
                raise_for(code, error.value)
                return
            if while_waiting is not None:
                while_waiting(error.value.decode(errors="replace").partition(" waits for ")[2])

    def send_bytes(
        self, dest: int, tag: int, data: Any, timeout: float | None = None, label: str = "send_bytes"
    ) -> None:
        """Sends one message and waits until its memory may be reused.

        A large message (above 8000 bytes) waits until the receiver asks for it.

        Args:
            dest: Rank that calls `recv_bytes`.
            tag: Any number from 0. Messages of one tag arrive in the order in which they were sent.
            data: Contiguous bytes-like object of any size, such as bytes or a numpy array.
            timeout: Seconds, or None to wait as long as the peer lives.
            label: Words for the message, for ranks that ask what this one waits for.

        Raises:
            PeerError: The peer was lost or left.
            TransportTimeoutError: The time is over. The message is not taken back, and `data` is held until the peer
                has it.
        """
        with self._lock:
            sequence = self._sent[dest, tag]
            self._sent[dest, tag] += 1
        view = memoryview(data).cast("B")
        pointer, keep = _pointer_to(view)
        operation = self._library.smp_operation_send(
            self._open_handle(),
            dest,
            self._message_key(tag, sequence),
            label.encode(),
            pointer,
            view.nbytes,
        )
        self._finish_send(operation, timeout, keep, f"sending {view.nbytes} bytes to rank {dest}")

    def recv_bytes(
        self,
        src: int,
        tag: int,
        timeout: float | None = None,
        while_waiting: Callable[[], None] | None = None,
        label: str = "recv_bytes",
    ) -> memoryview:
        """Waits for the next message of a tag from a rank.

        Args:
            src: Rank that calls `send_bytes`.
            tag: The sender's tag.
            timeout: Seconds, or None to wait as long as the peer lives.
            while_waiting: Called several times a second meanwhile. An error of it ends the wait. The message can still
                be received later, unless another thread has waited for the next message of this tag.
            label: Words for the message, for ranks that ask what this one waits for.

        Returns:
            The message, in memory of its own.

        Raises:
            PeerError: The peer was lost or left.
            TransportTimeoutError: The time is over. The message can still be received later, unless another thread has
                waited for the next message of this tag.
        """
        # The caller would need a lock for one receiver at a time per tag. Here a lost turn is given back.
        with self._lock:
            sequence = self._received[src, tag]
            self._received[src, tag] += 1
            operation = self._on_their_way.pop((src, tag, sequence), None)
        while True:
            is_new = operation is None
            if operation is None:
                key = self._message_key(tag, sequence)
                operation = self._library.smp_operation_recv(self._open_handle(), src, key, label.encode())
            try:
                code = self._await(operation, timeout, f"a message of rank {src}, tag {tag}", while_waiting)
            except BaseException:
                self._give_up(operation, src, tag, sequence)
                raise
            if is_new or not self._library.smp_operation_message(operation).endswith(_WITHDRAWN):
                break
            # The receive was given up before its message came.
            self._library.smp_operation_free(operation)
            operation = None
        try:
            raise_for(code, self._library.smp_operation_message(operation))
            count = ctypes.c_uint64()
            data = self._library.smp_operation_take(operation, ctypes.byref(count))
            return _own(data, count.value)
        finally:
            self._library.smp_operation_free(operation)

    def _await(self, operation: int, timeout: float | None, what: str, while_waiting: Callable[[], None] | None) -> int:
        """Waits for an operation, and returns its status."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = SLICE_S if deadline is None else deadline - time.monotonic()
            code = int(self._library.smp_operation_wait(operation, max(0.0, min(left, SLICE_S))))
            if code >= 0:
                return code
            if left <= 0:
                raise TransportTimeoutError(f"{what}: not done within {timeout} s")
            if while_waiting is not None:
                while_waiting()

    def _give_up(self, operation: int, src: int, tag: int, sequence: int) -> None:
        """Lets the next receive of a tag have the message of this one, even if that is on its way already."""
        self._library.smp_operation_withdraw(operation)
        with self._lock:
            if self._received[src, tag] == sequence + 1 and not self._why_closed:
                self._received[src, tag] = sequence
                self._on_their_way[src, tag, sequence] = operation
                return
        # Another thread has received the next message meanwhile.
        self._library.smp_operation_cancel(operation)
        self._library.smp_operation_free(operation)

    def begin_step(self, program: int, step: int) -> None:
        """Says that this rank is inside a step, as the op SmpBegin does."""
        self._library.smp_transport_begin_step(self._open_handle(), program, step)

    def end_step(self, program: int) -> None:
        """Says that this rank has left its step, as the op SmpEnd does."""
        self._library.smp_transport_end_step(self._open_handle(), program)

    def await_step(self, program: int, step: int, *, ended: bool, timeout: float = 1e9) -> bool:
        """Waits until this rank has begun, or ended, a step of a program, or is beyond it.

        Args:
            program: Number of the program.
            step: Number of its step, from 0.
            ended: Whether to wait for its end, or else its begin.
            timeout: Seconds at most.

        Returns:
            Whether that has happened. It is False after the time, or once `stop_awaiting` was called.
        """
        code = self._library.smp_transport_await_step(self._open_handle(), program, step, ended, timeout)
        return bool(code == OK)

    def stop_awaiting(self) -> None:
        """Ends every `await_step`, now and later."""
        self._library.smp_transport_stop_awaiting(self._open_handle())

    def set_activity(self, activity: str) -> None:
        """Says what this rank is doing, for ranks that wait for it. "" says that it is over."""
        self._library.smp_transport_set_activity(self._open_handle(), activity.encode())

    def set_program_ranks(self, program: int, ranks: Iterable[int]) -> None:
        """Says which ranks take part in a program. Only if one of these leaves early are its steps disturbed."""
        numbers = sorted(ranks)
        array = (ctypes.c_uint32 * len(numbers))(*numbers)
        self._library.smp_transport_set_program_ranks(self._open_handle(), program, array, len(numbers))

    def set_averaging_ranks(self, program: int, ranks: Iterable[int]) -> None:
        """Says which ranks this one averages with in a program's steps. The program may have other numbers there.

        All of them call such steps in the same order. So once one has left, a step after its last one is an error.
        """
        numbers = sorted(ranks)
        array = (ctypes.c_uint32 * len(numbers))(*numbers)
        self._library.smp_transport_set_averaging_ranks(self._open_handle(), program, array, len(numbers))

    def goodbye(self, timeout: float = 2.0) -> None:
        """Tells all ranks that this one leaves in good order.

        A rank fails at once with "rank r left the loop early after step s" if it waits for this one, is inside a step
        that this one never began, or begins one later.
        """
        self._library.smp_transport_goodbye(self._open_handle(), timeout)

    def await_goodbyes(self, ranks: Iterable[int], timeout: float) -> bool:
        """Waits until ranks have left, that is until each has said goodbye or is gone, or the job has failed.

        Args:
            ranks: The ranks whose goodbyes are waited for.
            timeout: Seconds to wait at most.

        Returns:
            False when the time was over before.
        """
        wanted = list(ranks)
        numbers = (ctypes.c_uint32 * len(wanted))(*wanted)
        code = self._library.smp_transport_await_goodbyes(self._open_handle(), numbers, len(wanted), timeout)
        return bool(code == OK)

    def abort(self, message: str, *, exit_code: int = 1, timeout: float = 1.0, **details: Any) -> bool:
        """Makes this the cause of the job's end, unless there is a cause already, and tells all ranks.

        Args:
            message: What happened, in one line. It is printed on every rank, and cut after some 4000 bytes.
            exit_code: The exit code of every process that does not end by itself.
            timeout: Seconds to wait until the ranks are told.
            **details: More fields of the cause, with values that JSON knows.

        Returns:
            False if there was a cause already.
        """
        cause = {"kind": "exception", "rank": self.rank, **details, "message": message}
        text = json.dumps(cause).encode()
        code = self._library.smp_transport_abort(self._open_handle(), text, exit_code, timeout)
        return bool(code == OK)

    def hold_words(self, seconds: float) -> None:
        """Holds the line that tells the cause of the job's end, so that it can stand after a traceback.

        A signal that ends the process releases it, too.

        Args:
            seconds: The longest that it is held. With 0 it has been printed when this returns, if there is a cause.
        """
        self._library.smp_transport_hold_words(self._open_handle(), seconds)

    @property
    def cause(self) -> dict[str, Any] | None:
        """Returns the first cause of the job's end (kind, rank, message, ...); None while all is well."""
        text = self._text(self._library.smp_transport_cause)
        if not text:
            return None
        try:
            cause = json.loads(text)
        except ValueError:
            cause = None
        if not isinstance(cause, dict):
            cause = {"kind": "unknown", "message": text}
        # Another rank may have said it.
        return {**cause, "message": plain_text(str(cause.get("message", "")))}

    def ask(self, rank: int, timeout: float = 1.0) -> dict[str, Any] | None:
        """Asks a rank what it is doing. It answers even while its main thread is stuck.

        Args:
            rank: The rank that is asked. This rank itself answers at once.
            timeout: Seconds to wait for the answer.

        Returns:
            `rank`, `clock_ns` (of its host's monotonic clock, when it answered), `in_step`,
            `program`, `step` (-1 before the first), `step_seconds` since it began or ended, `averages` (steps begun
            that average with other ranks; see `set_averaging_ranks`),
            `activity` (see `set_activity`), `activity_seconds`, `collectives` (hashes of what it has come to and
            is not through; see `collective.come_to`), `more_collectives` (whether there are others), `collective` (the
            name of the first), `collective_seconds` since it came to that, and `waits`: for each rank it waits
            for the oldest operation, with `peer`, `is_send`, `label`, `program`, `step`,
            `microbatch`, `seconds`. None if no answer came in time.
        """
        out = ctypes.create_string_buffer(MAX_CONTROL_BYTES + 1)
        code = self._library.smp_transport_ask(self._open_handle(), rank, timeout, out, len(out))
        if code != OK:
            return None
        status: dict[str, Any] = json.loads(out.value.decode(errors="replace"))
        return status

    def unclaimed(self) -> dict[int, int]:
        """Returns how many messages of `send_bytes` have come that nobody has received, by their senders."""
        counts: defaultdict[int, int] = defaultdict(int)
        for message in self.stats()["unmatched"]:
            if message["program"] == MESSAGE_PROGRAM:
                counts[message["source"]] += 1
        return dict(counts)

    def stats(self) -> dict[str, Any]:
        """Returns messages and bytes per peer and edge, lanes, refused messages, CPU seconds, and huge pages made."""
        stats: dict[str, Any] = json.loads(self._text(self._library.smp_transport_stats))
        return stats

    @property
    def reads_memory(self) -> list[bool]:
        """Returns, for every rank, whether this one fetches large tensors from its memory."""
        return [peer["reads_memory"] for peer in self.stats()["peers"]]

    def lanes(self, peer: int) -> list[str]:
        """Returns the names of UCX's transports in use to a rank, such as ["posix"]."""
        handle = self._open_handle()
        out = ctypes.create_string_buffer(512)
        self._library.smp_transport_lanes(handle, peer, out, len(out))
        return [name for name in out.value.decode().split(",") if name]

    def cancel_all(self, reason: str) -> None:
        """Ends every pending operation of this rank with a cancelled status."""
        self._library.smp_transport_cancel_all(self._open_handle(), reason.encode())

    def close(self) -> None:
        """Ends all operations and threads. A second call does nothing."""
        with self._lock:
            if self._why_closed:
                return
            self._why_closed = f"the transport of rank {self.rank} is closed"
        atexit.unregister(self._leave_at_exit)
        self._library.smp_transport_shutdown(self._handle)
        while self._on_their_way:
            self._library.smp_operation_free(self._on_their_way.popitem()[1])

    @property
    def is_open(self) -> bool:
        """Returns whether `close` was not called yet, and this is not a forked child."""
        return not self._why_closed

    def _leave_at_exit(self) -> None:
        """Says goodbye, or why it does not, when Python ends with an open transport."""
        if self.is_open:
            self.goodbye()
            self.close()

    def _leave_to_parent(self) -> None:
        """Ends the use by this process, a forked child. It makes no call of C, now or later."""
        self._why_closed = self._why_closed or (
            f"this process, {os.getpid()}, was forked from rank {self.rank} and is no rank itself: only the process "
            f"that called smp.init may exchange with other ranks. Have the child work on what it is given, and hand "
            f"its results back to its parent"
        )
        self._free.detach()
        self._on_their_way.clear()
        # Another thread of the parent may have held it.
        self._lock = threading.RLock()
        atexit.unregister(self._leave_at_exit)

    def _open_handle(self) -> int:
        if self._why_closed:
            raise TransportError(self._why_closed)
        return self._handle

    def _message_key(self, tag: int, sequence: int) -> MessageKey:
        return MessageKey(MESSAGE_PROGRAM, 0, tag, sequence)

    def _text(self, function: Any) -> str:
        count = 1 << 16
        while True:
            out = ctypes.create_string_buffer(count)
            needed = function(self._open_handle(), out, count)
            if needed <= count:
                return out.value.decode(errors="replace")
            count = needed

    def _finish_send(self, operation: int, timeout: float | None, keep: Any, what: str) -> None:
        """Waits for a send and frees it. The data is kept as long as the send needs it."""
        try:
            code = self._await(operation, timeout, what, None)
            raise_for(code, self._library.smp_operation_message(operation))
        except BaseException:
            self._library.smp_operation_cancel(operation)
            raise
        finally:
            _free_when_released(operation, keep)


_transports: weakref.WeakSet[Transport] = weakref.WeakSet()


@functools.cache
def _hook_forks() -> None:
    """Makes forked children leave transports to their parent."""

    def leave_to_parent() -> None:
        for transport in list(_transports):
            transport._leave_to_parent()

    os.register_at_fork(after_in_child=leave_to_parent)


def _own(data: int | None, count: int) -> memoryview:
    if not data or count == 0:
        if data:
            functions().smp_bytes_free(data)
        return memoryview(b"")
    array = (ctypes.c_char * count).from_address(data)
    # It is not freed when Python ends, since what runs then may still read it.
    weakref.finalize(array, functions().smp_bytes_free, data).atexit = False
    return memoryview(array).cast("B")


def _pointer_to(view: memoryview) -> tuple[int, Any]:
    """Returns the address of a contiguous buffer, and an object that keeps it in place."""
    if view.nbytes == 0:
        return 0, None
    import numpy as np

    array = np.frombuffer(view, dtype=np.uint8)
    return int(array.ctypes.data), array


def _free_when_released(operation: int, keep: Any) -> None:
    """Frees an operation. A send that was given up keeps its memory until the transport is done."""
    library = functions()
    if keep is None or library.smp_operation_released(operation):
        library.smp_operation_free(operation)
        return

    def wait() -> None:
        held = keep
        while not library.smp_operation_released(operation):
            time.sleep(SLICE_S)
        library.smp_operation_free(operation)
        del held

    threading.Thread(target=wait, name="smp_release", daemon=True).start()
