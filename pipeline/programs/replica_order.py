"""Proves that replicas which make sums over each other within tasks come to these tasks in orders that can run.

    replica 0   0F0 0F1 0B0 0B1        0F1 of replica 0 waits for the part of 0F1 of replica 1, which is after 0B0;
    replica 1   0F0 0B0 0F1 0B1        0B0 of replica 1 waits for the part of 0B0 of replica 0, which is after 0F1

Such a task gives its part while it runs, and ends when it has those of all replicas that have the task. So it begins,
on all of them, after what it needs on each. Replicas with as many microbatches have the same lists, which agree. Those
with fewer have other lists.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from smp_tf.pipeline.errors import ProgramError
from smp_tf.pipeline.programs.dependencies import dependencies
from smp_tf.pipeline.task import Edge, Program, Task

#: A task of a replica: the number of the replica, and that of the task in its lists.
_Place = tuple[int, int]


def check_replica_order(
    programs: Sequence[Program], edges: Sequence[Edge] | None, has_sums: Callable[[Task], bool]
) -> None:
    """Raises an error that says who waits where, unless replicas come through their sums over each other.

    Args:
        programs: the program of every replica, each checked by itself.
        edges: the edges that their SEND and RECV tasks name; None for programs without transfers.
        has_sums: returns whether a compute task makes sums over the replicas.

    Raises:
        ProgramError: replicas wait for each other forever.
    """
    needs = _needs(programs, edges, has_sums)
    readers: dict[_Place, list[_Place]] = defaultdict(list)
    missing = {place: len(needed) for place, needed in needs.items()}
    for place, needed in needs.items():
        for need in needed:
            readers[need].append(place)
    done: set[_Place] = set()
    ready = [place for place, count in missing.items() if not count]
    while ready:
        place = ready.pop()
        done.add(place)
        for reader in readers[place]:
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    if len(done) < len(needs):
        raise ProgramError(
            "Replicas must come to their sums over each other in one order, such as to moments over the samples of all "
            "replicas. Otherwise they wait for each other forever. With this schedule, a replica with fewer "
            "microbatches has another order. Give all replicas batches of one size (drop_remainder=True), or use "
            "'pipeline': 'interleaved', 'simple' or 'zb_h1'. Received:\n" + "\n".join(_who_waits(programs, done))
        )


def _needs(
    programs: Sequence[Program], edges: Sequence[Edge] | None, has_sums: Callable[[Task], bool]
) -> dict[_Place, set[_Place]]:
    """Returns what each compute task and transfer of each replica comes after, of its own replica and of others."""
    needs: dict[_Place, set[_Place]] = {}
    common: dict[Task, list[_Place]] = defaultdict(list)
    for replica, program in enumerate(programs):
        depends = dependencies(program, edges)
        number = 0
        for tasks in program.ranks:
            before: _Place | None = None
            for task in tasks:
                place = replica, number
                if task.kind.is_compute or task.kind.is_transfer:
                    needs[place] = {(replica, need) for need in depends.needs[number]}
                if task.kind.is_compute:
                    needs[place] |= set() if before is None else {before}
                    before = place
                    if has_sums(task):
                        common[task].append(place)
                number += 1
    for places in common.values():
        needed = set[_Place]().union(*(needs[place] for place in places))
        for place in places:
            needs[place] = needed
    return needs


def _who_waits(programs: Sequence[Program], done: set[_Place]) -> Iterator[str]:
    for replica, program in enumerate(programs):
        number = 0
        for rank, tasks in enumerate(program.ranks):
            places = [(task, (replica, number + position)) for position, task in enumerate(tasks)]
            number += len(tasks)
            head = next((task for task, place in places if task.kind.is_compute and place not in done), None)
            stands = "is through its list" if head is None else f"stands before {head}"
            yield f"  replica {replica}, rank {rank} {stands}"
