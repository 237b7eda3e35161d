"""One rank of a test: opens the transport, meets the others, then plays its part.

Run as `python rank_process.py <part> <rank> <size> <options as JSON> <fd to tell>`; commands come
as lines on stdin, what it tells goes out as JSON lines. See `rank_fleet.py` for the other end.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smp_tf.ops.errors import TransportError
from smp_tf.ops.transport import Transport, TransportOptions

SECRET = b"the secret of this job: 32 bytes"
PROGRAM = 1
#: What a part wants to be called after all that is registered once the transport is open.
AT_EXIT: list[Callable[[], None]] = []


class Rank:
    """What a part is played with."""

    def __init__(self, transport: Transport, tell_fd: int) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.size = transport.size
        self._out = os.fdopen(tell_fd, "w", buffering=1)

    def tell(self, event: str, **values: Any) -> None:
        self._out.write(json.dumps({"event": event, **values}) + "\n")

    def ask(self) -> Any:
        """Waits for a command, as a main thread that is stuck would, without end."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None

    def tell_error(self, function: Callable[[], Any]) -> None:
        try:
            function()
        except TransportError as error:
            self.tell("error", type=type(error).__name__, message=str(error))
        else:
            self.tell("no error")


def wait_in_step(rank: Rank) -> None:
    """All are in step 7; rank 0 waits for rank 1, the others sit in something that never ends."""
    rank.transport.begin_step(PROGRAM, 7)
    rank.tell("ready", pid=os.getpid())
    if rank.rank == 0:
        rank.tell_error(lambda: rank.transport.recv_bytes(1, tag=1))
    rank.ask()


def abort_on_command(rank: Rank) -> None:
    """A rank that is told to aborts; the others find the cause."""
    rank.transport.begin_step(PROGRAM, 3)
    rank.tell("ready")
    if rank.ask() == "abort":
        rank.transport.abort("rank 1: ValueError: the loss is not a number\nin line 5\x1b[2J", exit_code=3)
        rank.transport.abort("a second cause", exit_code=4)
    else:
        rank.tell_error(lambda: rank.transport.recv_bytes(1, tag=1))
    rank.tell("cause", cause=rank.transport.cause)
    rank.ask()


def hold_words(rank: Rank) -> None:
    """Holds the line of a failure for a minute, and lets it go when told; rank 1 aborts."""
    rank.transport.hold_words(60.0)
    rank.tell("ready")
    if rank.ask() == "abort":
        rank.transport.abort("rank 1 has had enough", exit_code=3)
    else:
        rank.tell_error(lambda: rank.transport.recv_bytes(1, tag=1))
    print("a traceback", file=sys.stderr, flush=True)
    if rank.ask() == "let go":
        rank.transport.hold_words(0.0)
        print("an end", file=sys.stderr, flush=True)
    rank.ask()


def leave_early(rank: Rank) -> None:
    """Rank 1 leaves after step 4; rank 0 enters step 5 and waits for it."""
    transport = rank.transport
    transport.begin_step(PROGRAM, 4)
    transport.end_step(PROGRAM)
    rank.tell("ready")
    how = rank.ask()
    if rank.rank == 1:
        transport.goodbye()
        rank.tell("left")
        rank.ask()
        return
    transport.begin_step(PROGRAM, 5)
    rank.tell("in step 5")
    if how == "receive":
        rank.tell_error(lambda: transport.recv_bytes(1, tag=1))
    elif how == "send":
        rank.ask()
        rank.tell_error(lambda: transport.send_bytes(1, 1, b"x" * 100_000))
    rank.ask()


def leave_between_steps(rank: Rank) -> None:
    """Both end a step that averages, by another number on each; rank 1 leaves, and then rank 0 begins the next one."""
    transport = rank.transport
    program = PROGRAM + rank.rank
    transport.set_program_ranks(program, [rank.rank])
    transport.set_averaging_ranks(program, [1 - rank.rank])
    transport.begin_step(program, 4)
    transport.end_step(program)
    rank.tell("ready")
    if rank.ask() == "leave":
        transport.goodbye()
        rank.tell("left")
        rank.ask()
        return
    transport.await_goodbyes([1], 20.0)
    # Without gradients: it is nothing to the other replica.
    transport.set_program_ranks(PROGRAM + 2, [0])
    transport.begin_step(PROGRAM + 2, 0)
    transport.end_step(PROGRAM + 2)
    rank.tell("evaluated", cause=transport.cause)
    rank.ask()
    transport.begin_step(program, 5)
    rank.ask()


def leave_in_order(rank: Rank) -> None:
    """Rank 1 ends its last step first, sends what is still needed, leaves and exits."""
    transport = rank.transport
    transport.begin_step(PROGRAM, 0)
    if rank.rank == 1:
        transport.send_bytes(0, 1, b"the last word")
        transport.end_step(PROGRAM)
        transport.goodbye()
        transport.close()
        return
    rank.tell("ready")
    rank.ask()
    rank.tell("got", data=bytes(transport.recv_bytes(1, 1, timeout=10)).decode())
    transport.end_step(PROGRAM)
    transport.goodbye()
    transport.close()


def await_steps(rank: Rank) -> None:
    """A thread waits for steps that the main thread begins and ends, and at last for one that never comes."""
    transport = rank.transport
    found: list[bool] = []

    def wait() -> None:
        for step, ended in ((4, False), (4, True), (2, True), (9, False)):
            found.append(transport.await_step(PROGRAM, step, ended=ended))

    thread = threading.Thread(target=wait)
    thread.start()
    for act in (
        lambda: transport.begin_step(PROGRAM + 1, 9),
        lambda: transport.begin_step(PROGRAM, 3),
        lambda: transport.begin_step(PROGRAM, 4),
        lambda: transport.end_step(PROGRAM),
        transport.stop_awaiting,
    ):
        act()
        rank.tell(
            "now", reached=[transport.await_step(PROGRAM, 4, ended=ended, timeout=0.0) for ended in (False, True)]
        )
    thread.join()
    rank.tell("thread", found=found)


def await_goodbyes(rank: Rank) -> None:
    """Rank 0 waits until the others have left; rank 1 says goodbye, rank 2 is killed."""
    transport = rank.transport
    if rank.rank == 0:
        rank.tell("before", others=transport.await_goodbyes([1, 2], 0.0), itself=transport.await_goodbyes([0], 0.0))
        rank.ask()
        transport.goodbye()
        rank.tell("one", left=transport.await_goodbyes([1], 20.0))
        rank.tell("all", left=transport.await_goodbyes(range(3), 20.0))
    else:
        rank.tell("ready")
        rank.ask()
        transport.goodbye()
        rank.tell("left")
        rank.ask()


def stall(rank: Rank) -> None:
    """Rank 0 waits while rank 1 does something else for a while."""
    transport = rank.transport
    transport.begin_step(PROGRAM, 2)
    if rank.rank == 1:
        transport.set_activity("writing a checkpoint")
        rank.tell("ready")
        if rank.ask() == "send":
            transport.send_bytes(0, 9, b"late")
        rank.ask()
        return
    rank.tell("ready")
    rank.ask()
    try:
        rank.tell("got", data=bytes(transport.recv_bytes(1, 9)).decode())
    except TransportError as error:
        rank.tell("error", message=str(error))
    rank.ask()


def answer_while_stuck(rank: Rank) -> None:
    """Rank 1 receives without end in step 7, then sits at a read; rank 0 asks it what it does."""
    transport = rank.transport
    if rank.rank == 0:
        rank.tell("before", status=transport.ask(1))
        rank.ask()
        deadline = time.monotonic() + 10
        status = transport.ask(1)
        while not (status and status["waits"]) and time.monotonic() < deadline:
            status = transport.ask(1)
        rank.tell("stuck", status=status, own=transport.ask(0))
        transport.send_bytes(1, 9, b"at last")
        rank.ask()
        rank.tell("free", status=transport.ask(1))
        rank.ask()
        rank.tell("stopped", status=transport.ask(1, timeout=0.3))
        rank.ask()
        return
    rank.ask()
    transport.begin_step(PROGRAM, 7)
    transport.set_activity('about to "wait"')
    rank.tell("in step")
    rank.tell("got", data=bytes(transport.recv_bytes(0, 9)).decode())
    transport.end_step(PROGRAM)
    transport.set_activity("")
    rank.tell("out of step")
    rank.ask()


def bytes_both_ways(rank: Rank) -> None:
    """Messages between two ranks: order per tag, timeouts, sizes, statistics, idle time."""
    transport = rank.transport
    peer = 1 - rank.rank
    for i in range(20):
        transport.send_bytes(peer, 5, bytes([i]) * i)
    got = [bytes(transport.recv_bytes(peer, 5)) for _ in range(20)]
    rank.tell("order", right=got == [bytes([i]) * i for i in range(20)])

    rank.tell_error(lambda: transport.recv_bytes(peer, 6, timeout=0.2))
    big = bytes(range(256)) * (64 << 12)
    if rank.rank == 0:
        transport.send_bytes(1, 6, big)
    else:
        rank.tell("big", right=bytes(transport.recv_bytes(0, 6)) == big)

    before = transport.stats()["progress_rounds"]
    rank.tell_error(lambda: transport.recv_bytes(peer, 7, timeout=2.0))
    rank.tell("idle", rounds=transport.stats()["progress_rounds"] - before)
    rank.tell("stats", stats=transport.stats(), lanes=transport.lanes(peer))
    rank.tell("network", sockets=network_sockets())
    if rank.rank == 1:
        rank.tell("children", forked=of_forked_child(network_sockets), started=of_started_program())
    rank.ask()
    transport.goodbye()
    transport.close()


def give_up_half_way(rank: Rank) -> None:
    """Rank 0 gives up receives: one whose message has not come, and one whose sender stops while it is moved."""
    transport = rank.transport
    big = bytes(range(256)) * (16 << 10)
    if rank.rank == 1:
        rank.ask()
        transport.send_bytes(0, 4, big)
        transport.send_bytes(0, 4, b"the next one")
        rank.tell("sent")
        rank.ask()
        return
    rank.tell_error(lambda: transport.recv_bytes(1, 4, timeout=0.0))
    rank.tell("gave up")
    while transport.stats()["unmatched_messages"] == 0:
        pass
    rank.tell("there")
    rank.ask()
    for _ in range(2):
        rank.tell_error(lambda: transport.recv_bytes(1, 4, timeout=0.2))
    rank.tell("gave up again")
    got = bytes(transport.recv_bytes(1, 4))
    rank.tell("got", right=got == big, then=bytes(transport.recv_bytes(1, 4)).decode())
    rank.ask()


def offer(rank: Rank) -> None:
    """Rank 1 sends what rank 0 does not take yet, and then one of them ends in one way or another."""
    transport = rank.transport
    transport.begin_step(PROGRAM, 7)
    if rank.rank == 1:
        thread = threading.Thread(target=lambda: rank.tell_error(lambda: transport.send_bytes(0, 4, b"x" * 1_000_000)))
        thread.start()
        end_as(rank, rank.ask())
        thread.join()
        rank.tell("closed")
        rank.ask()
        return
    while transport.stats()["unmatched_messages"] == 0:
        pass
    rank.tell("there")
    command = rank.ask()
    if command == "receive":
        rank.tell_error(lambda: transport.recv_bytes(1, 4))
    else:
        end_as(rank, command)
        rank.tell("closed")
    rank.ask()


def end_as(rank: Rank, command: str) -> None:
    if "goodbye" in command:
        rank.transport.goodbye()
    if "close" in command:
        rank.transport.close()


def send_unreadable(rank: Rank) -> None:
    """Rank 1 sends memory that the kernel shows to nobody else, as a device's may be."""
    size = 1 << 20
    if rank.rank == 0:
        for tag in (4, 5):
            rank.tell("got", right=bytes(rank.transport.recv_bytes(1, tag)) == b"s" * size)
        rank.ask()
        return
    memfd_secret = 447
    fd = ctypes.CDLL(None, use_errno=True).syscall(memfd_secret, 0)
    if fd < 0:
        rank.tell("sent", without=os.strerror(ctypes.get_errno()))
        return
    os.ftruncate(fd, size)
    memory = mmap.mmap(fd, size)
    memory[:] = b"s" * size
    for tag in (4, 5):
        rank.transport.send_bytes(0, tag, memoryview(memory))
    rank.tell("sent", without=None)
    rank.ask()


def network_sockets() -> list[str]:
    """The TCP and UDP sockets that this process has open."""
    opened = {os.readlink(f.path) for f in os.scandir("/proc/self/fd") if os.path.lexists(f.path)}
    found = []
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        path = Path("/proc/self/net") / kind
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            if f"socket:[{line.split()[9]}]" in opened:
                found.append(f"{kind} {line}")
    return found


def of_forked_child(function: Callable[[], Any]) -> Any:
    """What a function returns in a child that is forked, and then ends without a word."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, json.dumps(function()).encode())
        os._exit(0)
    os.wait()
    return json.loads(os.read(reading, 1 << 16))


def of_started_program() -> list[str]:
    """The network sockets that a program has which is started as `system` of C starts one: it inherits all it may."""
    code = "import json; from tests.ops.rank_process import network_sockets; print(json.dumps(network_sockets()))"
    return list(json.loads(subprocess.check_output([sys.executable, "-c", code], close_fds=False)))


def fork_and_exit(rank: Rank) -> None:
    """Rank 1 forks children that end as scripts do, while rank 0 waits for it; then both end, and read what came."""
    transport, data = rank.transport, bytes(range(256)) * 4096
    got: list[Any] = []
    AT_EXIT.append(lambda: rank.tell("at exit", right=bytes(got[0]) == data))
    transport.begin_step(PROGRAM, 3)
    if rank.rank == 1:
        for code in (0, 7):
            if os.fork() == 0:
                got.append(data)
                rank.tell_error(transport.goodbye)
                sys.exit(code)
            _, status = os.wait()
            rank.tell("child", code=os.waitstatus_to_exitcode(status))
        transport.send_bytes(0, 1, data)
        got.append(data)
    else:
        got.append(transport.recv_bytes(1, 1))
    transport.end_step(PROGRAM)
    rank.tell("stats", refused=transport.stats()["refused_messages"])
    if rank.rank == 0:
        close_within_call(transport)
        rank.tell_error(transport.stats)


def close_within_call(transport: Transport) -> None:
    """Another thread closes it when a call has begun, and takes away what the call needs."""
    library = transport._library

    class Closing:
        def __getattr__(self, name: str) -> Any:
            function = getattr(library, name)
            if name != "smp_transport_stats":
                return function

            def call(*arguments: Any) -> Any:
                transport.close()
                return function(*arguments)

            return call

    transport._library = Closing()  # type: ignore[assignment]
    assert transport.stats()["rank"] == transport.rank


def stall_unread(rank: Rank) -> None:
    """Ranks 1 and 2 wait for a message of rank 0, which does not come, and say so; then rank 0 asks what they do."""
    rank.transport.begin_step(PROGRAM, 2)
    rank.tell("ready")
    if rank.rank > 0:
        rank.tell_error(lambda: rank.transport.recv_bytes(0, 9))
        # As if stuck in native code, with the error not told.
        rank.ask()
        return
    # They look every half second for whom to speak of, and speak once that one has answered.
    rank.tell_error(lambda: rank.transport.recv_bytes(1, 8, timeout=1.7))
    rank.tell("asked", answers=[rank.transport.ask(peer) is not None for peer in (1, 2)])
    rank.ask()


PARTS: dict[str, Callable[[Rank], None]] = {
    part.__name__: part
    for part in (
        abort_on_command,
        hold_words,
        answer_while_stuck,
        bytes_both_ways,
        give_up_half_way,
        fork_and_exit,
        leave_between_steps,
        leave_early,
        leave_in_order,
        offer,
        send_unreadable,
        await_goodbyes,
        await_steps,
        stall,
        stall_unread,
        wait_in_step,
    )
}


def main() -> None:
    name, rank_text, size_text, options, tell_fd = sys.argv[1:]
    if name.startswith("tf_"):
        from tests import quick_import

        quick_import.install()
        from tests.ops import tensor_parts

        PARTS.update(tensor_parts.PARTS)
    atexit.register(lambda: [function() for function in AT_EXIT])
    settings = json.loads(options)
    secret = settings.pop("secret", SECRET.decode()).encode()
    transport = Transport.open(int(rank_text), int(size_text), TransportOptions(local_size=int(size_text), **settings))
    rank = Rank(transport, int(tell_fd))
    rank.tell("address", address=transport.address.hex())
    addresses = [bytes.fromhex(text) for text in rank.ask()]
    try:
        transport.connect(addresses, secret, timeout=5)
    except TransportError as error:
        rank.tell("not connected", message=str(error))
        rank.ask()
        return
    rank.tell("connected")
    PARTS[name](rank)


if __name__ == "__main__":
    main()
