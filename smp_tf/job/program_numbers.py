"""The numbers of programs, which messages bear. No rank of a replica uses a number twice."""

from __future__ import annotations

from collections.abc import Iterable

from smp_tf.job import runtime
from smp_tf.job.exchange import allgather_json
from smp_tf.partition.mesh import CommGroup
from smp_tf.watch.replicas import know_program
from smp_tf.watch.steps import name_program

#: The highest number that this process has used since it began. So a message of an ended job means nothing to the next.
_used = 0


def used() -> int:
    """Returns the highest number that this process has used for a program."""
    return _used


def use_next(used_by_ranks: Iterable[int]) -> int:
    """Returns a number that nobody has used, and uses it.

    Args:
        used_by_ranks: the highest numbers that the ranks of a replica have used, with this rank's.
    """
    global _used
    _used = 1 + max(used_by_ranks)
    return _used


def agree_on_number(doing: str) -> int:
    """Returns a number that no rank of this replica has used for a program before.

    Args:
        doing: words for what the program computes, the same on all ranks of the replica.

    Returns:
        The number, equal on all of them.

    Raises:
        RankMismatchError: a rank does something else.
    """
    said = allgather_json(_used, CommGroup.MP_GROUP, name=doing, doing=f"about to compute {doing}")
    number = use_next(said)
    say(number, repr(doing))
    return number


def know_averaging(number: int, known_as: str, *, everywhere: bool) -> None:
    """Notes that a program gives gradients that replicas average, so that no replica can end it without the others.

    Args:
        number: number of the program.
        known_as: what its step function is known by on all ranks.
        everywhere: whether all replicas call this now; else only this one does.
    """
    running = runtime.current()
    topology, transport = running.topology, running.transport
    assert transport is not None, "a world of several ranks has a transport"
    know_program(number, known_as, everywhere=everywhere)
    replicas = topology.members(CommGroup.RDP_GROUP)
    transport.set_averaging_ranks(number, [rank for rank in replicas if rank != topology.rank])


def say(number: int, named: str) -> None:
    """Tells reports what a program is, and tells the transport which ranks it cannot end without.

    Args:
        number: number of the program.
        named: words for what it computes.
    """
    name_program(number, named)
    running = runtime.current()
    topology, transport = running.topology, running.transport
    assert transport is not None, "a world of several ranks has a transport"
    transport.set_program_ranks(number, topology.members(CommGroup.MP_GROUP))
