"""One rank's end of the exchanges between ranks. They are small JSON messages outside the training steps.

There is one kind of exchange over the transport. The first rank of the group collects what each rank says, and then
tells all of them the same verdict:

    rank 1 ──▶ ┐              ┌ ──▶ rank 1      the verdict is what all have said,
    rank 2 ──▶ ┼ ──▶ rank 0 ──┼ ──▶ rank 2      or who did not come in time,
    rank 3 ──▶ ┘              └ ──▶ rank 3      or who came for something else

So where a rank fails, leaves, is late or runs another program, all ranks raise an error with the same words.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from smp_tf.errors import RankMismatchError
from smp_tf.watch.deadlock import IN_BACKGROUND, DeadlockWatch

if TYPE_CHECKING:
    from smp_tf.ops.transport import Transport

PROTOCOL_VERSION = 1
# The transport's words for the wait in an exchange.
_EXCHANGE = "what it has to say"
SIZE_LIMIT = 64 << 20
# Seconds by which the others give up later than the first rank, since its verdict is the better message.
_PATIENCE = 10.0


class ControlChannel:
    """One rank's end of the exchanges.

    Args:
        rank: This rank.
        transport: How bytes travel; None in a world of one process.
        stall_timeout: Seconds after which the absence of a rank is an error.
        describe: Names a rank for messages.
        in_background: Whether this is the end of the threads that save in the background. Their exchanges never mix
            with those of the main threads, and say nothing of what a rank is doing.
    """

    def __init__(
        self,
        rank: int,
        transport: Transport | None,
        stall_timeout: float,
        describe: Callable[[int], str] = "rank {}".format,
        *,
        in_background: bool = False,
    ) -> None:
        self.describe = describe
        self._in_background = in_background
        self._label = IN_BACKGROUND if in_background else _EXCHANGE
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
        """Gathers as `allgather_json` does; `members` are world ranks in group order."""
        return self._exchange(value, members, name, timeout, lambda said: said, doing)

    def broadcast(self, value: Any, root: int, members: Sequence[int], name: str, timeout: float | None = None) -> Any:
        """Broadcasts as `broadcast_json` does; `members` are world ranks in group order."""
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
        if self._in_background:
            verdict = self._verdict(text, members, name, seconds, conclude, None)
        else:
            others = [rank for rank in members if rank != self._rank]
            watch = DeadlockWatch(self._transport, others, doing, self.describe)
            self._transport.set_activity(doing)
            try:
                verdict = self._verdict(text, members, name, seconds, conclude, watch.look)
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
        look: Callable[[], None] | None,
    ) -> dict[str, Any]:
        """Collects what all ranks say, or hears what the first rank has collected."""
        if self._rank == members[0]:
            verdict = self._collect(text, members, name, seconds, conclude, look)
            told = _encode(verdict, name)
            for other in members[1:]:
                if other not in verdict.get("missing", ()):
                    self._send(other, members, told)
            return verdict
        self._send(members[0], members, text)
        heard = self._receive(members[0], members, seconds + _PATIENCE, look)
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
        look: Callable[[], None] | None,
    ) -> dict[str, Any]:
        """Receives what the others say, and decides what all are told."""
        deadline = time.monotonic() + seconds
        said = {self._rank: _decode(mine, name)}
        missing = []
        for other in members[1:]:
            left = max(0.1, deadline - time.monotonic())
            told = self._receive(other, members, left, look)
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
        self._transport.send_bytes(to, self._tag(members), text, label=self._label)

    def _tag(self, members: Sequence[int]) -> int:
        subject = "control in the background" if self._in_background else "control"
        return tag_of(subject, tuple(members))

    def _receive(
        self, source: int, members: Sequence[int], seconds: float, look: Callable[[], None] | None
    ) -> bytes | None:
        """Returns a message, or None if it has not come in time."""
        assert self._transport is not None, "a group of several ranks has a transport"
        try:
            tag = self._tag(members)
            told = self._transport.recv_bytes(source, tag, seconds, while_waiting=look, label=self._label)
            return bytes(told)
        except TimeoutError:
            return None


def tag_of(*words: object) -> int:
    """Returns the transport's tag for messages about one subject.

    Messages of one tag arrive in order. The tag is a hash of 63 bits, the same on every rank. That is far more than
    enough to keep the few subjects apart.
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
