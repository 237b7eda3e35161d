"""Agreements and barriers between ranks, by small JSON messages outside the training steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smp_tf.job.agreement import require_agreement
from smp_tf.job.channel import ControlChannel
from smp_tf.job.runtime import current
from smp_tf.partition.mesh import CommGroup

Group = CommGroup | Sequence[int]


def allgather_json(
    value: Any,
    group: Group = CommGroup.WORLD,
    *,
    name: str,
    doing: str = "",
    timeout: float | None = None,
) -> list[Any]:
    """Gives every rank of a group what every rank of it says.

    Args:
        value: What this rank says: anything that JSON holds.
        group: The kind of group, or its world ranks. This rank is one of them.
        name: Words for the subject of the exchange, the same on all ranks.
        doing: Words for what this rank is doing, to follow "rank 1 is"; by default "at" and the name.
        timeout: Seconds to wait for a rank; by default the configured `stall_timeout`.

    Returns:
        What the ranks said, in group order.

    Raises:
        RankMismatchError: A rank did not come in time, came for another exchange, or waits in a step for a message that
            this rank will not send.
        PeerError: A rank of the group ended.
    """
    channel, members = _here(group)
    return channel.allgather(value, members, name, timeout, doing)


def broadcast_json(
    value: Any,
    root: int,
    group: Group = CommGroup.WORLD,
    *,
    name: str,
    timeout: float | None = None,
) -> Any:
    """Gives every rank of a group what one rank says.

    Args:
        value: What the root says. It is ignored on the others.
        root: World rank of the rank that speaks.
        group: The kind of group, or its world ranks. This rank is one of them.
        name: Words for the subject of the exchange, the same on all ranks.
        timeout: Seconds to wait for a rank; by default the configured `stall_timeout`.

    Returns:
        What the root said.

    Raises:
        RankMismatchError: A rank did not come in time, or came for another exchange.
        PeerError: A rank of the group ended.
    """
    channel, members = _here(group)
    return channel.broadcast(value, root, members, name, timeout)


def barrier(group: Group = CommGroup.WORLD, *, name: str = "a barrier", timeout: float | None = None) -> None:
    """Returns when all ranks of a group have called it.

    Args:
        group: The kind of group, or its world ranks. This rank is one of them.
        name: Words for what is waited for, the same on all ranks.
        timeout: Seconds to wait for a rank; by default the configured `stall_timeout`.

    Raises:
        RankMismatchError: A rank did not come in time, or came for another exchange.
        PeerError: A rank of the group ended.
    """
    channel, members = _here(group)
    channel.allgather(None, members, name, timeout)


def agree(
    name: str,
    value: Any,
    group: Group = CommGroup.WORLD,
    *,
    hint: str = "",
    timeout: float | None = None,
) -> None:
    """Raises an error on every rank of a group unless all of them have the same value.

    Args:
        name: Words for what they must agree on, the same on all ranks.
        value: What this rank has: anything that JSON holds. It is compared field by field.
        group: The kind of group, or its world ranks. This rank is one of them.
        hint: A sentence about what to do where they differ.
        timeout: Seconds to wait for a rank; by default the configured `stall_timeout`.

    Raises:
        RankMismatchError: They differ. The message says which rank does, and in which fields.
        PeerError: A rank of the group ended.
    """
    channel, members = _here(group)
    said = channel.allgather(value, members, name, timeout)
    require_agreement(name, dict(zip(members, said, strict=True)), channel.describe, hint)


def members_of(group: Group) -> tuple[int, ...]:
    """Returns the world ranks of a group that this rank is in.

    Args:
        group: The kind of group, or its world ranks.

    Raises:
        ValueError: This rank is not among the given ranks.
    """
    topology = current().topology
    if isinstance(group, CommGroup):
        return topology.members(group)
    members = tuple(int(rank) for rank in group)
    if topology.rank not in members:
        raise ValueError(f"Rank {topology.rank} is not in the group of ranks {list(members)}.")
    return members


def _here(group: Group) -> tuple[ControlChannel, tuple[int, ...]]:
    return current().control, members_of(group)
