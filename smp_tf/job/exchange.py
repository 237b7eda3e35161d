"""Agreements and barriers between ranks: small JSON messages, outside the training steps.

All of it is one kind of exchange over the transport, in which the first rank of the group collects
what each has to say and then tells everyone the same verdict:

    rank 1 ──▶ ┐              ┌ ──▶ rank 1      the verdict is what all have said,
    rank 2 ──▶ ┼ ──▶ rank 0 ──┼ ──▶ rank 2      or who did not come in time,
    rank 3 ──▶ ┘              └ ──▶ rank 3      or who came for something else

So a rank that fails, leaves, is late or runs another program is an error on all ranks at once, with
the same words.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from smp_tf.errors import RankMismatchError
from smp_tf.job.agreement import require_agreement
from smp_tf.job.runtime import current
from smp_tf.job.topology import CommGroup
from smp_tf.watch.deadlock import DeadlockWatch

if TYPE_CHECKING:
    from smp_tf.ops.transport import Transport

PROTOCOL_VERSION = 1
# What is waited for in an exchange, in the transport's words.
_EXCHANGE = "what it has to say"
SIZE_LIMIT = 64 << 20
# How much later than the first rank the others give up: its verdict is the better message.
_PATIENCE = 10.0

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
        group: The kind of group, or its world ranks; this rank is one of them.
        name: What the exchange is about, in words; the same on all ranks.
        doing: What this rank is doing, after "rank 1 is"; by default "at" the name.
        timeout: Seconds to wait for a rank; by default the configured `stall_timeout`.

    Returns:
        What the ranks said, in group order.

    Raises:
        RankMismatchError: A rank did not come in time, came for another exchange, or waits in a
            step for a message that this rank will not send.
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
        value: What the root says; ignored on the others.
        root: World rank of the one that speaks.
        group: The kind of group, or its world ranks; this rank is one of them.
        name: What the exchange is about, in words; the same on all ranks.
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
        group: The kind of group, or its world ranks; this rank is one of them.
        name: What is waited for, in words; the same on all ranks.
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
    """Raises on every rank of a group unless all of them have the same value.

    Args:
        name: What they must agree on, in words; the same on all ranks.
        value: What this rank has: anything that JSON holds. Compared field by field.
        group: The kind of group, or its world ranks; this rank is one of them.
        hint: What to do about a difference, in words.
        timeout: Seconds to wait for a rank; by default the configured `stall_timeout`.

    Raises:
        RankMismatchError: They differ; the message says which rank, and in which fields.
        PeerError: A rank of the group ended.
    """
    channel, members = _here(group)
    said = channel.allgather(value, members, name, timeout)
    require_agreement(name, dict(zip(members, said, strict=True)), channel.describe, hint)


def members_of(group: Group) -> tuple[int, ...]:
    """The world ranks of a group that this rank is in.

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


class ControlChannel:
    """One rank's end of the exchanges.

    Args:
        rank: This rank.
        transport: How bytes travel; None in a world of one process.
        stall_timeout: Seconds after which a rank that has not come is an error.
        describe: Names a rank for messages.
    """

    def __init__(
        self,
        rank: int,
        transport: Transport | None,
        stall_timeout: float,
        describe: Callable[[int], str] = "rank {}".format,
    ) -> None:
        self.describe = describe
        self._rank = rank
        self._transport = transport
        self._stall_timeout = stall_timeout

    def allgather(
        self,
        value: Any,
        members: Sequence[int],
        name: str,
        timeout: float | None = None,
        doing: str = "",
    ) -> list[Any]:
        """See `allgather_json`; `members` are world ranks in group order."""
        return self._exchange(value, members, name, timeout, lambda said: said, doing)

    def broadcast(self, value: Any, root: int, members: Sequence[int], name: str, timeout: float | None = None) -> Any:
        """See `broadcast_json`; `members` are world ranks in group order."""
        if root not in members:
            raise ValueError(f"{name}: the root, rank {root}, is not in the group {list(members)}.")
        place = list(members).index(root)
        mine = value if self._rank == root else None
        return self._exchange(mine, members, name, timeout, lambda said: said[place])

    def _exchange(
        self,
        value: Any,
        members: Sequence[int],
        name: str,
        timeout: float | None,
        conclude: Callable[[list[Any]], Any],
        doing: str = "",
    ) -> Any:
        text = _encode({"version": PROTOCOL_VERSION, "name": name, "value": value}, name)
        if len(members) == 1:
            return conclude([json.loads(text)["value"]])
        seconds = self._stall_timeout if timeout is None else timeout
        assert self._transport is not None, "a group of several ranks has a transport"
        doing = doing or f"at {name}"
        others = [rank for rank in members if rank != self._rank]
        watch = DeadlockWatch(self._transport, others, doing, self.describe)
        self._transport.set_activity(doing)
        try:
            verdict = self._verdict(text, members, name, seconds, conclude, watch)
        finally:
            self._transport.set_activity("")
        if "error" in verdict:
            raise RankMismatchError(verdict["error"])
        return verdict["result"]

    def _verdict(
        self,
        text: bytes,
        members: Sequence[int],
        name: str,
        seconds: float,
        conclude: Callable[[list[Any]], Any],
        watch: DeadlockWatch,
    ) -> dict[str, Any]:
        """Collects what all say, or hears what the first rank has collected."""
        if self._rank == members[0]:
            verdict = self._collect(text, members, name, seconds, conclude, watch)
            told = _encode(verdict, name)
            for other in members[1:]:
                if other not in verdict.get("missing", ()):
                    self._send(other, members, told)
            return verdict
        self._send(members[0], members, text)
        heard = self._receive(members[0], members, seconds + _PATIENCE, watch)
        if heard is None:
            return {"error": self._too_late(name, [members[0]], seconds + _PATIENCE)}
        return _decode(heard, name)

    def _collect(
        self,
        mine: bytes,
        members: Sequence[int],
        name: str,
        seconds: float,
        conclude: Callable[[list[Any]], Any],
        watch: DeadlockWatch,
    ) -> dict[str, Any]:
        """Receives what the others say and decides what all are told."""
        deadline = time.monotonic() + seconds
        said = {self._rank: _decode(mine, name)}
        missing = []
        for other in members[1:]:
            left = max(0.1, deadline - time.monotonic())
            told = self._receive(other, members, left, watch)
            if told is None:
                missing.append(other)
            else:
                said[other] = _decode(told, name)
        if missing:
            return {"error": self._too_late(name, missing, seconds), "missing": missing}
        for what in ("version", "name"):
            astray = {rank: words[what] for rank, words in said.items()}
            if len(set(astray.values())) > 1:
                return {"error": self._astray(what, astray)}
        return {"result": conclude([said[rank]["value"] for rank in members])}

    def _too_late(self, name: str, missing: Sequence[int], seconds: float) -> str:
        who = ", ".join(self.describe(rank) for rank in missing)
        return (
            f"{who} did not come to {name} within {seconds:.0f} s, while other ranks waited. "
            "Every rank must make the same calls in the same order; a rank that only needs longer "
            "gets it with a larger stall_timeout."
        )

    def _astray(self, what: str, said: dict[int, Any]) -> str:
        words = "; ".join(f"{self.describe(rank)} is at {at!r}" for rank, at in said.items())
        if what == "version":
            return f"The ranks run different versions of smp_tf's control protocol: {words}."
        return (
            f"The ranks are at different places of the script: {words}. Every rank must make the "
            "same calls in the same order."
        )

    def _send(self, to: int, members: Sequence[int], text: bytes) -> None:
        assert self._transport is not None, "a group of several ranks has a transport"
        self._transport.send_bytes(to, tag_of("control", tuple(members)), text, label=_EXCHANGE)

    def _receive(self, source: int, members: Sequence[int], seconds: float, watch: DeadlockWatch) -> bytes | None:
        """Returns a message, or None if it has not come in time."""
        assert self._transport is not None, "a group of several ranks has a transport"
        try:
            tag = tag_of("control", tuple(members))
            told = self._transport.recv_bytes(source, tag, seconds, while_waiting=watch.look, label=_EXCHANGE)
            return bytes(told)
        except TimeoutError:
            return None


def tag_of(*words: object) -> int:
    """The transport's tag for what is said between ranks about one thing.

    Messages of one tag arrive in order. The tag is a hash, the same on every rank, of 63 bits: far
    more than enough to keep apart the few lines there are.
    """
    digest = hashlib.blake2b(repr(words).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _encode(value: Any, name: str) -> bytes:
    text = json.dumps(value, allow_nan=True, separators=(",", ":")).encode()
    if len(text) > SIZE_LIMIT:
        raise ValueError(f"{name}: {len(text)} bytes of JSON are more than {SIZE_LIMIT}.")
    return text


def _decode(text: bytes, name: str) -> dict[str, Any]:
    if len(text) > SIZE_LIMIT:
        raise RankMismatchError(f"{name}: received {len(text)} bytes, more than {SIZE_LIMIT}.")
    try:
        value = json.loads(text)
    except ValueError as error:
        raise RankMismatchError(f"{name}: received something that is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RankMismatchError(f"{name}: received a {type(value).__name__} of JSON, not a dict.")
    return value
