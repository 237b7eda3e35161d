"""Starts Horovod, makes its process sets for our groups, and exchanges bytes between all ranks at the start."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

import horovod.tensorflow as hvd
from horovod.common.exceptions import HorovodInternalError

from smp_tf.errors import EnvironmentSetupError, PeerError
from smp_tf.partition.mesh import CommGroup, Mesh

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

# The most bytes that a rank may say to the others at the start.
_HELLO_LIMIT = 1 << 20


@dataclasses.dataclass(frozen=True)
class ProcessSets:
    """The Horovod process sets of this rank. A group of one has none, since it has nothing to reduce.

    Args:
        mp: The set of the ranks of this rank's replica.
        dp: The set of the ranks that hold the same weights as this one.
        owned: The sets that smp_tf added, in the same order on all ranks.
    """

    mp: hvd.ProcessSet | None
    dp: hvd.ProcessSet | None
    owned: tuple[hvd.ProcessSet, ...]


@dataclasses.dataclass(frozen=True)
class World:
    """Where this process is, according to Horovod."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def world() -> World:
    """Returns where this process is, according to Horovod."""
    return World(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())


class Attendance(Protocol):
    """Knows which ranks have come to the start of a job."""

    def lost(self) -> Sequence[str]:
        """Returns words for the ranks that came and have ended."""


class Watch(Protocol):
    """Is told that Horovod's start waits for other ranks."""

    @property
    def arrivals(self) -> Attendance:
        """Returns the object that knows who has come."""

    def await_those_missing(self) -> None:
        """Waits for ranks that have not come yet. It is called before all others wait."""

    def await_others(self) -> None:
        """Notes that all have come."""


def start_horovod(watch: Watch) -> None:
    """Starts Horovod unless it runs already.

    Args:
        watch: Is told whom the start waits for.

    Raises:
        PeerError: A rank ended meanwhile.
    """
    if not hvd.is_initialized():
        watch.await_those_missing()
        try:
            hvd.init(process_sets="dynamic")
        except ValueError as error:
            lost = watch.arrivals.lost()
            if not lost:
                raise
            raise PeerError(f"{_in_words(lost)} ended while Horovod started in smp.init.") from error
        watch.await_others()


def _in_words(lost: Sequence[str]) -> str:
    who = " and ".join(lost)
    return f"{who[:1].upper()}{who[1:]}"


def built_with() -> str:
    """Returns words for what this Horovod was built with."""
    parts = [name for name, built in (("MPI", hvd.mpi_built()), ("Gloo", hvd.gloo_built())) if built]
    return " and ".join(parts) or "neither MPI nor Gloo"


def add_process_sets(mesh: Mesh, rank: int) -> ProcessSets:
    """Adds the sets of all mp and rdp groups. Every rank calls this with the same mesh.

    Args:
        mesh: The mesh of all ranks.
        rank: This rank.

    Returns:
        The sets that this rank is in.
    """
    # Adding a set is a collective of the world. So every rank adds the sets of all groups, in one order.
    sets: dict[tuple[int, ...], hvd.ProcessSet] = {tuple(range(mesh.world_size)): hvd.global_process_set}
    owned = []
    for kind in (CommGroup.MP_GROUP, CommGroup.RDP_GROUP):
        for members in mesh.groups(kind):
            if len(members) > 1 and tuple(sorted(members)) not in sets:
                try:
                    added = hvd.add_process_set(list(members))
                except ValueError as error:
                    raise EnvironmentSetupError(
                        f"Horovod refuses the group of ranks {list(members)}: {error}. If the "
                        "script adds process sets of its own, let it do so after smp.init() and "
                        "leave out those that smp_tf has made."
                    ) from error
                sets[tuple(sorted(members))] = added
                owned.append(added)

    def mine(kind: CommGroup) -> hvd.ProcessSet | None:
        members = tuple(sorted(mesh.members(kind, rank)))
        return sets[members] if len(members) > 1 else None

    return ProcessSets(mine(CommGroup.MP_GROUP), mine(CommGroup.RDP_GROUP), tuple(owned))


def remove_process_sets(owned: Iterable[hvd.ProcessSet]) -> None:
    """Removes what `add_process_sets` added. Every rank calls this.

    Args:
        owned: `ProcessSets.owned` of what it returned.
    """
    for added in owned:
        hvd.remove_process_set(added)


def exchange_bytes(
    payload: bytes, name: str, most: int = _HELLO_LIMIT, lost: Callable[[], Sequence[str]] = list
) -> list[bytes]:
    """Gives every rank what every rank says. It is for the start, before there is a transport.

    Args:
        payload: What this rank says.
        name: A name of this exchange that all ranks use.
        most: The most bytes that a rank may say.
        lost: Returns words for the ranks whose processes are gone, as far as is known. It is called where the exchange
            fails.

    Returns:
        What the ranks said, in rank order.

    Raises:
        PeerError: A rank ended meanwhile.
    """
    import numpy as np
    import tensorflow as tf

    if hvd.size() == 1:
        return [payload]
    if len(payload) > most:
        raise ValueError(f"{name}: {len(payload)} bytes are more than {most}.")

    def allgather(values: Any, part: str) -> Sequence[Any]:
        gathered = hvd.allgather(
            tf.convert_to_tensor(values), name=f"{name}.{part}", process_set=hvd.global_process_set
        )
        return gathered.numpy()

    try:
        lengths = allgather(np.array([len(payload)], np.int64), "lengths")
        together = bytes(allgather(np.frombuffer(payload, np.uint8), "bytes"))
    except (tf.errors.OpError, HorovodInternalError) as error:
        who = _in_words(lost() or ["another rank"])
        raise PeerError(
            f"{who} ended while the ranks greeted each other ({name}). Its own message, earlier in the output, says "
            f"why; of one that was killed, the launcher says which it was."
        ) from error
    said, start = [], 0
    for length in lengths:
        said.append(together[start : start + int(length)])
        start += int(length)
    return said
