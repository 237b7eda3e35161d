"""Finds what each task of a program has to wait for.

    F(chunk - 1) --> F(chunk) ------------------> F(chunk + 1)
                        |  stash
                        v
    B(chunk - 1) <-- B(chunk) <------------------ B(chunk + 1)

With edges, the arrows between ranks are the program's own transfers: maker --> SEND --> RECV --> reader, and nothing
else. Without edges, each chunk needs the one before it in every sweep.

Tasks are numbers here, in the order of the lists, rank after rank. A list of what a number needs is read far faster
than a table of tasks, above all where it is larger than a processor's caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from smp_tf.pipeline.programs.kinds import KINDS
from smp_tf.pipeline.programs.places import Places
from smp_tf.pipeline.task import Edge, Program, Task


@dataclass(frozen=True, slots=True)
class Dependencies:
    """What each task of a program needs finished before it starts.

    Attributes:
        tasks: the task of each number: those of the lists, rank after rank, and after them those
            that the program lacks although something needs them.
        first: the number of the first task of each rank. The last entry is the number of tasks in the lists.
        needs: the numbers of what each task of the lists needs.
    """

    tasks: Sequence[Task]
    first: Sequence[int]
    needs: Sequence[tuple[int, ...]]

    def by_task(self) -> Mapping[Task, tuple[Task, ...]]:
        """Returns what each task of the lists needs, by the tasks themselves."""
        tasks = self.tasks
        return {tasks[at]: tuple(tasks[need] for need in needs) for at, needs in enumerate(self.needs)}


def dependencies(program: Program, edges: Sequence[Edge] | None = None) -> Dependencies:
    """Returns the tasks that each task of a program needs finished before it starts.

    Args:
        program: any program, even one that cannot run.
        edges: the edges that its SEND and RECV tasks name; None for a program without transfers, whose chunks are
            assumed to form a chain.

    Returns:
        For each task of the program, what it needs. Tasks that the program lacks are named, too.

    Raises:
        ProgramError: the program has transfers and no edges are given, or it has a transfer of an edge that is not
            given.

    Example:
        >>> from smp_tf.pipeline.programs.text import parse_program
        >>> dependencies(parse_program("0F0 0B0")).needs
        [(), (0,)]
    """
    places = Places(program, edges)
    needs = [KINDS[task.kind].needs(places, rank, task) for rank, tasks in enumerate(program.ranks) for task in tasks]
    return Dependencies(places.tasks, [0, *accumulate(map(len, program.ranks))], needs)
