"""Python objects between ranks: `smp.send`, `smp.recv_from`, `smp.broadcast` and their kin.

Objects are pickled, so they go only to and come only from ranks of this job, which have proved its
secret. Between two ranks messages arrive in the order in which they were sent.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from smp_tf import control
from smp_tf.errors import MessageError
from smp_tf.runtime import current
from smp_tf.topology import CommGroup, RankType

if TYPE_CHECKING:
    from smp_tf.ops.transport import Transport


_OBJECTS = control.tag_of("objects")


def send(obj: Any, dest_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> None:
    """Sends an object to one rank, which must call `recv_from`.

    Args:
        obj: Anything that can be pickled.
        dest_rank: The receiver's number, as counted by `rank_type`.
        rank_type: What `dest_rank` counts.

    Raises:
        MessageError: The object cannot be pickled, or the receiver is this rank.
        PeerError: The receiver ended.

    Example:
        >>> if smp.mp_rank() == 0:
        ...     smp.send({"epoch": 3}, 1, smp.RankType.MP_RANK)
    """
    destination = _other("send to", dest_rank, rank_type)
    _transport().send_bytes(destination, _OBJECTS, _pickle(obj))


def recv_from(src_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> Any:
    """Receives the next object that one rank sent or broadcast to this one.

    Args:
        src_rank: The sender's number, as counted by `rank_type`.
        rank_type: What `src_rank` counts.

    Returns:
        The object.

    Raises:
        MessageError: The sender is this rank, or the object cannot be unpickled here.
        PeerError: The sender ended.
    """
    source = _other("receive from", src_rank, rank_type)
    return _unpickle(_transport().recv_bytes(source, _OBJECTS), source)


def broadcast(obj: Any, group: CommGroup = CommGroup.WORLD) -> None:
    """Sends an object to all other ranks of a group, which must call `recv_from`.

    Args:
        obj: Anything that can be pickled.
        group: The kind of group; the one this rank is in.

    Raises:
        MessageError: The object cannot be pickled.
        PeerError: A receiver ended.
    """
    _require_group(group)
    running = current()
    text = _pickle(obj)
    for other in running.topology.members(group):
        if other != running.topology.rank:
            _transport().send_bytes(other, _OBJECTS, text)


def allgather(obj: Any, group: CommGroup = CommGroup.WORLD) -> list[Any]:
    """Gives every rank of a group what every rank of it has; all of them must call it.

    Args:
        obj: Anything that can be pickled.
        group: The kind of group; the one this rank is in.

    Returns:
        The objects in the order of the group's ranks.

    Raises:
        MessageError: The object cannot be pickled, or one cannot be unpickled here.
        PeerError: A rank of the group ended.
    """
    _require_group(group)
    running = current()
    first, *others = running.topology.members(group)
    text = _pickle(obj)
    if not others:
        return [_unpickle(text, first)]
    # The first rank of the group collects and hands out, so that no two ranks wait for each other.
    transport, tag = _transport(), control.tag_of("allgather", first, *others)
    if running.topology.rank != first:
        transport.send_bytes(first, tag, text)
        texts = pickle.loads(transport.recv_bytes(first, tag))
    else:
        texts = [text]
        texts += [bytes(transport.recv_bytes(other, tag)) for other in others]
        together = pickle.dumps(texts)
        for other in others:
            transport.send_bytes(other, tag, together)
    return [_unpickle(text, rank) for text, rank in zip(texts, (first, *others), strict=True)]


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Returns when all ranks of a group have called it.

    Args:
        group: The kind of group; the one this rank is in.

    Raises:
        PeerError: A rank of the group ended.
    """
    _require_group(group)
    control.barrier(group, name=f"smp.barrier({group.name})")


def mp_barrier() -> None:
    """Returns when all ranks of this replica have called it."""
    barrier(CommGroup.MP_GROUP)


def dp_barrier() -> None:
    """Returns when all ranks that run this rank's partition have called it."""
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


def _pickle(obj: Any) -> bytes:
    try:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise MessageError(
            f"An object of type {type(obj).__name__} cannot be pickled, so it cannot be sent: {error}"
        ) from error


def _unpickle(text: bytes | memoryview, source: int) -> Any:
    try:
        return pickle.loads(text)
    except Exception as error:
        raise MessageError(f"An object that rank {source} sent cannot be unpickled here: {error}") from error
