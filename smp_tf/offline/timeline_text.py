"""A timeline as text: the steps of every replica, what every rank's time was spent on, and how it was planned."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from smp_tf.errors import TimelineError
from smp_tf.partition.plan.plan import as_seconds
from smp_tf.pipeline.measure.recorded import RankRecord, one_step
from smp_tf.pipeline.measure.step_anatomy import PARTS, StepAnatomy

#: The names of the parts of a rank's time.
WORDS = {
    "compute": "compute",
    "bubble": "bubble",
    "message": "waiting for a message",
    "reduce": "reduce",
    "apply": "apply",
    "input": "input",
    "other": "other",
}


@dataclass(frozen=True)
class RecordedReplica:
    """What was recorded of one replica.

    Args:
        number: number of the replica, as far as its ranks are known.
        ranks: world rank of every stage.
        records: the records of these ranks; None for a rank without one.
        steps: the steps by program number and step number, as on the first of its ranks that has them.
    """

    number: int
    ranks: tuple[int, ...]
    records: tuple[RankRecord | None, ...]
    steps: dict[tuple[int, int], StepAnatomy]

    def spent(self, stage: int) -> dict[str, float]:
        """Returns what a rank's time was spent on, in seconds by `PARTS`, on average over its recorded steps."""
        known = [step.time_spent(stage) for step in self.steps.values() if step.stages[stage] is not None]
        return {part: sum(each[part] for each in known) / len(known) / 1e9 if known else 0.0 for part in PARTS}

    def said(self) -> Iterator[str]:
        """Yields lines about its steps."""
        for record in self.records:
            if record is not None and record.dropped:
                yield f"rank {record.rank}: {record.dropped} moments were not kept; record fewer steps at a time"
        absent = [rank for rank, record in zip(self.ranks, self.records, strict=True) if record is None]
        if absent:
            yield f"no file of rank {', '.join(map(str, absent))}: what is waited for from there counts as bubble"
        yield from self._order()
        whole = {name: step for name, step in self.steps.items() if step.is_whole}
        for (_, number), step in whole.items():
            forecast = step.simulated()
            begin, end = step.span
            yield (
                f"step {number} of {step.program.name}: pipeline {as_seconds((end - begin) / 1e9)}, bubble "
                f"{step.bubble_ratio:.1%}; by the plan with these times of tasks "
                f"{as_seconds(forecast.step_time / 1e9)}, {forecast.bubble_ratio:.1%}"
            )
        yield from self._averaging()

    def averaging(self) -> tuple[float, float]:
        """Returns how long gradients are averaged, and how much of this is hidden (`StepAnatomy.averaging`).

        Returns:
            Seconds on average over ranks and over the steps that are known on all of them; 0 where there are none.
        """
        whole = [step for step in self.steps.values() if step.is_whole]
        found = [step.averaging(stage) for step in whole for stage in range(len(self.ranks))] or [(0, 0)]
        taken, hidden = (sum(times) / len(found) / 1e9 for times in zip(*found, strict=True))
        return taken, hidden

    def _averaging(self) -> Iterator[str]:
        taken, hidden = self.averaging()
        if taken:
            yield (
                f"gradients were averaged over replicas for {as_seconds(taken)} of a step, {hidden / taken:.0%} of it "
                f"hidden: before the last task ended"
            )

    def _order(self) -> Iterator[str]:
        found = False
        for (_, number), step in self.steps.items():
            for stage, rank in enumerate(self.ranks):
                pair = step.out_of_order(stage) if step.stages[stage] is not None else None
                if pair is not None:
                    found = True
                    yield f"step {number}: on rank {rank}, {pair[0]} and {pair[1]} did not run as planned"
        if not found:
            yield "all tasks ran one after the other, in the order of the plan"


def replicas_of(records: Sequence[RankRecord]) -> list[RecordedReplica]:
    """Groups the records of ranks by replicas.

    Args:
        records: one record for each rank.

    Returns:
        The replicas that have any record.

    Raises:
        TimelineError: no step was recorded on any rank.
    """
    if not any(record.steps for record in records):
        raise TimelineError(
            "No step was recorded. Steps are counted from 0 where a recording begins, and a step that is not split "
            "(one process, one microbatch) is not recorded."
        )
    by_rank = {record.rank: record for record in records}
    found = []
    for number, ranks in enumerate(sorted({record.ranks for record in records})):
        own = tuple(by_rank.get(rank) for rank in ranks)
        there = [record for record in own if record is not None]
        programs = {name: program for record in there for name, program in record.programs.items()}
        names = list(dict.fromkeys((step.program, step.step) for record in there for step in record.steps))
        steps = {}
        for name in names:
            stages = [None if record is None else one_step([record], *name)[0] for record in own]
            steps[name] = StepAnatomy(programs[name[0]], stages)
        found.append(RecordedReplica(number, ranks, own, steps))
    return found


def text(replicas: Sequence[RecordedReplica], width: int = 100, color: bool = False) -> str:
    """Returns the report for a terminal.

    Args:
        replicas: the recorded replicas.
        width: columns of the terminal.
        color: whether the terminal shows colours.

    Returns:
        Lines.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(title="where the time of a step went", title_justify="left", expand=False)
    for heading in ("rank", "stage", "step", *(WORDS[part] for part in PARTS)):
        table.add_column(heading, justify="right")
    for rank, stage, spent in rows(replicas):
        whole = sum(spent.values())
        shares = (f"{spent[part] / whole:.0%}" if whole else "" for part in PARTS)
        table.add_row(str(rank), str(stage), as_seconds(whole), *shares)
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=color or None).print(table)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    for replica in replicas:
        lines += [f"replica {replica.number}:"] if len(replicas) > 1 else []
        lines += replica.said()
    return "\n".join(lines)


def rows(replicas: Sequence[RecordedReplica]) -> Iterator[tuple[int, int, dict[str, float]]]:
    """Returns rank, stage and time spent for every recorded rank."""
    for replica in replicas:
        for stage, rank in enumerate(replica.ranks):
            if replica.records[stage] is not None:
                yield rank, stage, replica.spent(stage)
