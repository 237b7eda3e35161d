"""Sends Python objects between ranks: `smp.send`, `smp.recv_from`, `smp.broadcast` and similar calls.

Objects are pickled. So they go only to ranks of this job, and come only from them, because these have proved the job's
secret. Between two ranks, messages arrive in the order in which they were sent.

A large array in an object is not copied into the pickle (PEP 574). It follows as a message of its own, from the array's
memory into the memory that the received array then uses.

    header: the object's number, number and sizes of parts, and the pickle if it is small ──▶
    the pickle, if it is large                                                            ──▶
    large buffer 1, large buffer 2, ...                                                   ──▶

Threads of a rank may send and receive at the same time, since an object goes as a whole. A message that does not fit
its header is an error, and nothing of it is unpickled. A signal handler may not send or receive, because the call that
it interrupts in its own thread cannot go on meanwhile.
"""

from __future__ import annotations

import contextlib
import pickle
import struct
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from smp_tf.errors import MessageError
from smp_tf.job import channel, exchange
from smp_tf.job.runtime import current
from smp_tf.partition.mesh import CommGroup, RankType
from smp_tf.watch.deadlock import OBJECT

if TYPE_CHECKING:
    from smp_tf.ops.transport import Transport


_OBJECTS = channel.tag_of("objects")

# The size in bytes from which a part of an object is a message of its own.
_LARGE = 1 << 16
# The begin of a header: a mark, the number of parts, the number of earlier objects, and the call of `smp.allgather`
# that it belongs to. The sizes of the parts follow.
_HEADER = struct.Struct("<8sQQQ")
_MARK = b"smpobj\x02\n"
_SIZE = struct.Struct("<Q")

# The result of pickling: the pickle, then the large buffers that it refers to.
_Parts = list[Any]


def send(obj: Any, dest_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> None:
    """Sends an object to one rank, which must call `recv_from`.

    Args:
        obj: Anything that can be pickled.
        dest_rank: The receiver's number, as counted by `rank_type`.
        rank_type: What `dest_rank` counts.

    Raises:
        MessageError: The object cannot be pickled, or the receiver is this rank.
        PeerError: The receiver ended.
        TypeError: `rank_type` is no `smp.RankType`.
        ValueError: There is no such rank.

    Example:
        >>> if smp.mp_size() > 1 and smp.mp_rank() == 0:
        ...     smp.send({"epoch": 3}, 1, smp.RankType.MP_RANK)
    """
    destination = _other("send to", dest_rank, rank_type)
    parts = _pickle(obj)
    with _doing(f"in smp.send to rank {destination}"):
        _send_parts(destination, _OBJECTS, parts)


def recv_from(src_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> Any:
    """Receives the next object that a rank has sent or broadcast to this one.

    Args:
        src_rank: The sender's number, as counted by `rank_type`.
        rank_type: What `src_rank` counts.

    Returns:
        The object.

    Raises:
        MessageError: The sender is this rank, or the object cannot be unpickled here.
        PeerError: The sender ended.
        TypeError: `rank_type` is no `smp.RankType`.
        ValueError: There is no such rank.

    Example:
        >>> if smp.mp_rank() == 1:
        ...     epoch = smp.recv_from(0, smp.RankType.MP_RANK)["epoch"]
    """
    source = _other("receive from", src_rank, rank_type)
    with _doing(f"in smp.recv_from rank {source}"):
        parts = _receive_parts(source, _OBJECTS)
    return _unpickle(parts, source)


def broadcast(obj: Any, group: CommGroup = CommGroup.WORLD) -> None:
    """Sends an object to all other ranks of a group, which must call `recv_from`.

    Args:
        obj: Anything that can be pickled.
        group: The kind of group; the one this rank is in.

    Raises:
        MessageError: The object cannot be pickled.
        PeerError: A receiver ended.
        TypeError: `group` is no `smp.CommGroup`.

    Example:
        >>> if smp.rank() == 0:
        ...     smp.broadcast("names of the classes", smp.WORLD)
        ... else:
        ...     names = smp.recv_from(0)
    """
    _require_group(group)
    running = current()
    parts = _pickle(obj)
    with _doing(f"in smp.broadcast({group.name})"):
        for other in running.topology.members(group):
            if other != running.topology.rank:
                _send_parts(other, _OBJECTS, parts)


def allgather(obj: Any, group: CommGroup = CommGroup.WORLD) -> list[Any]:
    """Gives every rank of a group the objects of all its ranks.

    All of them must call it.

    Threads of a rank take turns, one whole call after the other. The first call on one rank meets the first on another,
    and so on. So the script must make its calls in the same order on all ranks.

    Args:
        obj: Anything that can be pickled.
        group: The kind of group; the one this rank is in.

    Returns:
        The objects in the order of the group's ranks.

    Raises:
        MessageError: The object cannot be pickled; or a received one cannot be unpickled here, or belongs to another
            call.
        PeerError: A rank of the group ended.
        TypeError: `group` is no `smp.CommGroup`.

    Example:
        >>> smp.allgather(smp.rank(), smp.DP_GROUP)
        [0]
    """
    _require_group(group)
    running = current()
    first, *others = running.topology.members(group)
    mine = _pickle(obj)
    if not others:
        return [_unpickle(mine, first)]
    # The first rank of the group collects and distributes, so that no two ranks wait for each other.
    tag = channel.tag_of("allgather", first, *others)
    ranks = (first, *others)
    calls = _stream(_transport(), running.topology.rank, tag, is_send=True)
    with calls.turn(), _doing(f"in smp.allgather({group.name})"):
        calls.count += 1
        call = calls.count
        if running.topology.rank != first:
            _send_parts(first, tag, mine, call)
            gathered = [mine if rank == running.topology.rank else _receive_parts(first, tag, call) for rank in ranks]
        else:
            gathered = [mine, *(_receive_parts(other, tag, call) for other in others)]
            for other in others:
                for rank, parts in zip(ranks, gathered, strict=True):
                    if rank != other:
                        _send_parts(other, tag, parts, call)
    return [_unpickle(parts, rank) for parts, rank in zip(gathered, ranks, strict=True)]


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Returns when all ranks of a group have called it.

    Args:
        group: The kind of group; the one this rank is in.

    Raises:
        PeerError: A rank of the group ended.
        TypeError: `group` is no `smp.CommGroup`.

    Example:
        >>> smp.barrier(smp.MP_GROUP)
    """
    _require_group(group)
    exchange.barrier(group, name=f"smp.barrier({group.name})")


def mp_barrier() -> None:
    """Returns when all ranks of this replica have called it.

    Raises:
        PeerError: A rank of the replica ended.

    Example:
        >>> smp.mp_barrier()
    """
    barrier(CommGroup.MP_GROUP)


def dp_barrier() -> None:
    """Returns when all ranks that run this rank's partition have called it.

    Raises:
        PeerError: One of these ranks ended.

    Example:
        >>> smp.dp_barrier()
    """
    barrier(CommGroup.DP_GROUP)


def _transport() -> Transport:
    transport = current().transport
    assert transport is not None, "there is another rank, so there is a transport"
    return transport


def _require_group(group: object) -> None:
    if not isinstance(group, CommGroup):
        names = ", ".join(f"smp.{kind.name}" for kind in CommGroup)
        raise TypeError(f"A group is one of {names}. Received: {group!r}")


def _other(doing: str, number: int, rank_type: Any) -> int:
    if not isinstance(rank_type, RankType):
        names = ", ".join(f"smp.RankType.{kind.name}" for kind in RankType)
        raise TypeError(f"rank_type is one of {names}. Received: {rank_type!r}")
    topology = current().topology
    other = topology.world_rank(number, rank_type)
    if other == topology.rank:
        raise MessageError(f"A rank cannot {doing} itself: {rank_type.name} {number} is this rank, {other}.")
    return other


@contextlib.contextmanager
def _doing(what: str) -> Iterator[None]:
    """Says what this rank is waiting in, for ranks that wait for it. Only the script's thread says so."""
    transport = current().transport
    if transport is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    transport.set_activity(what)
    try:
        yield
    finally:
        transport.set_activity("")


class _Stream:
    """The objects of one tag that go one way between this rank and another, one after the other."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_taken = False
        self.count = 0

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Waits until other threads have sent or received their object, and keeps them waiting within its context.

        Raises:
            MessageError: This thread is within a turn, so the wait would never end.
        """
        with self._lock:
            if self._is_taken:
                raise MessageError(_WITHIN)
            self._is_taken = True
            try:
                yield
            finally:
                self._is_taken = False


class _Streams:
    """The streams of one transport."""

    def __init__(self) -> None:
        # A signal handler may call this in the thread that it interrupts.
        self._lock = threading.RLock()
        self._streams: dict[tuple[int, int, bool], _Stream] = {}

    def find(self, other: int, tag: int, *, is_send: bool) -> _Stream:
        """Finds the stream to or from another rank. It begins when it is first asked for."""
        with self._lock:
            return self._streams.setdefault((other, tag, is_send), _Stream())


# They end with their transport, since the numbers count within its job.
_streams: weakref.WeakKeyDictionary[Transport, _Streams] = weakref.WeakKeyDictionary()
_streams_lock = threading.RLock()


def _stream(transport: Transport, other: int, tag: int, *, is_send: bool) -> _Stream:
    with _streams_lock:
        streams = _streams.setdefault(transport, _Streams())
    return streams.find(other, tag, is_send=is_send)


def _send_parts(to: int, tag: int, parts: _Parts, call: int = 0) -> None:
    transport = _transport()
    text, *buffers = parts
    apart = [*([text] if len(text) >= _LARGE else []), *buffers]
    inline = b"" if len(text) >= _LARGE else text
    sizes = b"".join(_SIZE.pack(len(part)) for part in apart)
    stream = _stream(transport, to, tag, is_send=True)
    with stream.turn():
        header = _HEADER.pack(_MARK, len(apart), stream.count, call)
        stream.count += 1
        transport.send_bytes(to, tag, header + sizes + inline, label=OBJECT)
        for part in apart:
            transport.send_bytes(to, tag, part, label=OBJECT)


def _receive_parts(source: int, tag: int, call: int = 0) -> _Parts:
    transport = _transport()
    stream = _stream(transport, source, tag, is_send=False)
    with stream.turn():
        header = transport.recv_bytes(source, tag, label=OBJECT)
        sizes, inline = _sizes_in(header, stream.count, source, call)
        stream.count += 1
        apart = []
        for number, size in enumerate(sizes):
            part = transport.recv_bytes(source, tag, label=OBJECT)
            if len(part) != size:
                raise MessageError(
                    f"{_BROKEN.format(source)} part {number + 1} of {len(sizes)} of object {stream.count} has "
                    f"{len(part)} bytes, and its header says {size}. {_NEVER}"
                )
            apart.append(part)
    return [inline, *apart] if len(inline) else apart


_WITHIN = (
    "A signal handler, or what else runs in the midst of a call, sends or receives objects between the same ranks as "
    "the call that it interrupts. That call cannot go on before the handler returns, so the wait would never end. Let "
    "the handler set a flag, and send or receive where the script looks at it."
)
_BROKEN = "Objects that rank {} sends do not come whole:"
_NEVER = (
    "An object was given up half-way, by an exception in smp.send or smp.recv_from that the script has caught. Nothing "
    "was unpickled; let such an exception end the script."
)


def _sizes_in(header: memoryview, number: int, source: int, call: int) -> tuple[list[int], memoryview]:
    """Returns the sizes of the parts that follow a header, and the rest of the header.

    Args:
        header: the header as received.
        number: number of the object that is due.
        source: the rank that sent it.
        call: number of the call of `smp.allgather` that it belongs to; 0 if it belongs to none.

    Raises:
        MessageError: it is no header, or the header of another object or call.
    """
    begin = _HEADER.size
    found = _HEADER.unpack(header[:begin]) if len(header) >= begin else None
    if found is None or found[0] != _MARK:
        raise MessageError(
            f"{_BROKEN.format(source)} {len(header)} bytes came where object {number + 1} was due. {_NEVER}"
        )
    _, count, sent, called = found
    if sent != number:
        raise MessageError(f"{_BROKEN.format(source)} object {sent + 1} came where {number + 1} was due. {_NEVER}")
    if called != call:
        raise MessageError(
            f"{_BROKEN.format(source)} an object of call {called} of smp.allgather came in call {call}. {_NEVER}"
        )
    end = begin + count * _SIZE.size
    if end > len(header):
        raise MessageError(
            f"{_BROKEN.format(source)} the header of object {number + 1} says {count} parts, and has no room for their "
            f"sizes. {_NEVER}"
        )
    if count == 0 and end == len(header):
        raise MessageError(f"{_BROKEN.format(source)} object {number + 1} has no content. {_NEVER}")
    return [size for (size,) in _SIZE.iter_unpack(header[begin:end])], header[end:]


def _pickle(obj: Any) -> _Parts:
    buffers: list[memoryview] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < _LARGE:
            return True
        buffers.append(view)
        return False

    try:
        return [pickle.dumps(obj, protocol=5, buffer_callback=keep_inside), *buffers]
    except Exception as error:
        raise MessageError(
            f"An object of type {type(obj).__name__} cannot be pickled, so it cannot be sent: {error}"
        ) from error


def _unpickle(parts: Sequence[Any], source: int) -> Any:
    text, *buffers = parts
    try:
        return pickle.loads(text, buffers=buffers)
    except Exception as error:
        raise MessageError(f"An object that rank {source} sent cannot be unpickled here: {error}") from error
