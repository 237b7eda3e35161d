"""Examines a recorded step of a replica: whether it ran as planned, where its time went, and what made it so long.

For a gap before a task, the message that came last tells the reason:

    rank 0   ───── 0F1 ─────┐ sent
    rank 1   ─ 0F0 ─┤ bubble ├ message ┤ other ├─ 1F1 ─
                                       there

Until the other rank had sent the message, the plan had nothing to do here: a bubble. Then the message was on its way.
TensorFlow took the rest to begin the task. As long as the other rank had not begun the step, this one waited for its
input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from smp_tf.pipeline.measure.recorded import Message, ProgramRecord, RecordedStep, TaskRun
from smp_tf.pipeline.programs.dependencies import dependencies
from smp_tf.pipeline.programs.kinds import KINDS
from smp_tf.pipeline.programs.replay import replay
from smp_tf.pipeline.programs.simulate import SimulatedStep
from smp_tf.pipeline.task import Kind, Task

#: What a rank's time is spent on, in the order of a table.
PARTS = ("compute", "bubble", "message", "reduce", "apply", "input", "other")


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a rank's time, and which of `PARTS` it was spent on."""

    part: str
    begin: int
    end: int


class StepAnatomy:
    """A recorded step of one replica.

    Args:
        program: the program, as planned.
        stages: the step on the rank of every stage, all on one clock; None where it was not recorded.
    """

    def __init__(self, program: ProgramRecord, stages: Sequence[RecordedStep | None]) -> None:
        self.program = program
        self.stages = tuple(stages)
        self._depends = dependencies(program.planned, program.edges)
        self._needs = self._depends.by_task()
        self._runs: dict[Task, tuple[int, TaskRun]] = {}
        self._messages: dict[Task, Message] = {}
        self._placement = program.planned.placement()
        for stage, step in enumerate(self.stages):
            if step is not None:
                self._runs.update((run.task, (stage, run)) for run in step.compute)
                self._messages.update((message.task, message) for message in step.messages)

    @property
    def is_whole(self) -> bool:
        """Returns whether the step is known on every stage."""
        return None not in self.stages

    def out_of_order(self, stage: int) -> tuple[Task, Task] | None:
        """Returns the first two tasks of a stage that ran at once or in another order than planned; None if none did.

        A task without anything to compute is planned but does not run.
        """
        step = self.stages[stage]
        assert step is not None
        place = {task: position for position, task in enumerate(self.program.planned.ranks[stage])}
        for first, second in zip(step.compute, step.compute[1:], strict=False):
            if place.get(first.task, -1) >= place.get(second.task, -1) or first.end > second.begin:
                return first.task, second.task
        return None

    @property
    def span(self) -> tuple[int, int]:
        """Returns when the first compute task of all began and the last one ended; both 0 where none ran."""
        runs = [run for _, run in self._runs.values()]
        return min((run.begin for run in runs), default=0), max((run.end for run in runs), default=0)

    @property
    def bubble_ratio(self) -> float:
        """Returns the share of the stages' time, from the first compute task to the last, without compute."""
        begin, end = self.span
        whole = (end - begin) * len(self.stages)
        return 1 - sum(run.end - run.begin for _, run in self._runs.values()) / whole if whole else 0.0

    def simulated(self, latency: float = 0.0) -> SimulatedStep:
        """Simulates the step as planned, with the time that each task took.

        Args:
            latency: nanoseconds that a message takes.
        """
        lengths = {task: float(run.end - run.begin) for task, (_, run) in self._runs.items()}
        planned = self.program.planned
        result = replay(planned, self._depends, lambda task: lengths.get(task, 0.0), lambda _: latency)
        return SimulatedStep(planned, result.spans)

    def critical_path(self) -> list[tuple[int, TaskRun]]:
        """Returns the chain of tasks that made the step so long, each with its stage, in the order they ran.

        The chain is found backwards from the task that ended last. Before a task comes what it had to wait for: the
        maker of the message that came last, or the task before it on its rank, whichever ended later.
        """
        path: list[tuple[int, TaskRun]] = []
        if self._runs:
            path.append(max(self._runs.values(), key=lambda found: found[1].end))
        while path:
            stage, run = path[-1]
            before = self._before(stage, run)
            if before is None:
                break
            path.append(before)
        return path[::-1]

    def _before(self, stage: int, run: TaskRun) -> tuple[int, TaskRun] | None:
        step = self.stages[stage]
        assert step is not None
        position = step.compute.index(run)
        own = step.compute[position - 1] if position else None
        last = self._last_message(run.task)
        if last is not None and (own is None or last.end > own.end):
            made = self._maker(last)
            if made is not None and made[1].end < run.end:
                return made
        return None if own is None else (stage, own)

    def _last_message(self, task: Task) -> Message | None:
        """Returns the message that came last among those that a task reads."""
        read = [self._messages[need] for need in self._needed(task) if need in self._messages]
        return max(read, key=lambda message: message.end, default=None)

    def _needed(self, task: Task) -> Iterator[Task]:
        """Yields the tasks that a task needs. One that had nothing to compute is replaced by those it needs."""
        for need in self._needs[task]:
            if need.kind.is_compute and need not in self._runs:
                yield from self._needed(need)
            else:
                yield need

    def _send(self, received: Message) -> Task | None:
        return next((need for need in self._needs[received.task] if need.kind is Kind.SEND), None)

    def _maker(self, received: Message) -> tuple[int, TaskRun] | None:
        """Returns the task that made a received message, the last one where several did."""
        send = self._send(received)
        if send is None:
            return None
        made = [self._runs[need] for need in self._needed(send) if need in self._runs]
        return max(made, key=lambda found: found[1].end, default=None)

    def pieces(self, stage: int) -> list[Piece]:
        """Returns what a rank's time was spent on, from the begin of the step to that of the next, without a hole.

        Args:
            stage: stage of the rank. The step must be recorded there.
        """
        return list(self._pieces(stage))

    def time_spent(self, stage: int) -> dict[str, int]:
        """Returns a rank's nanoseconds by what they were spent on, from the begin of the step to that of the next.

        Args:
            stage: stage of the rank. The step must be recorded there.

        Returns:
            Nanoseconds for each of `PARTS`.
        """
        spent = dict.fromkeys(PARTS, 0)
        for piece in self._pieces(stage):
            spent[piece.part] += piece.end - piece.begin
        return spent

    def averaging(self, stage: int) -> tuple[int, int]:
        """Returns how long a rank averages gradients over replicas, and how much of this is hidden.

        Args:
            stage: stage of the rank. The step must be recorded there.

        Returns:
            Nanoseconds in which at least one bucket was on its way; and how many of them were before the last compute
            task of all stages ended. These do not make the step longer.
        """
        step = self.stages[stage]
        assert step is not None
        _, last = self.span
        whole = hidden = 0
        at = step.begin
        for run in step.updates:
            if run.task.bucket is not None and run.end > at:
                begin = max(at, run.begin)
                whole += run.end - begin
                hidden += max(0, min(run.end, last) - begin)
                at = run.end
        return whole, hidden

    def _pieces(self, stage: int) -> Iterator[Piece]:
        step = self.stages[stage]
        assert step is not None
        at = step.begin
        for run in step.compute:
            yield from self._gap(stage, at, run.begin, self._last_message(run.task))
            yield Piece("compute", run.begin, run.end)
            at = run.end
        results = [message for message in step.messages if message.task.kind is Kind.RECV and message.end > at]
        last = max(results, key=lambda message: message.end, default=None)
        yield from self._after(step, [*self._gap(stage, at, step.end, last), Piece("input", step.end, step.until)])

    def _gap(self, stage: int, begin: int, end: int, message: Message | None) -> Iterator[Piece]:
        """Yields what the time between two tasks was spent on, where the later task waited for a message."""
        at = begin
        if message is not None and message.end > begin:
            send = self._send(message)
            source = self.stages[self._placement[send.chunk]] if send is not None else None
            if source is not None:
                sent = self._messages.get(send) if send is not None else None
                for part, until in (("input", source.begin), ("bubble", sent.begin if sent is not None else end)):
                    until = min(max(until, at), message.end, end)
                    yield from _piece(part, at, until)
                    at = until
                yield from _piece("message", at, min(message.end, end))
            else:
                # Only the other rank's record would tell whether it was on its way.
                yield from _piece("bubble", at, min(message.end, end))
            at = min(message.end, end)
        yield from _piece("other", at, end)

    def _after(self, step: RecordedStep, pieces: Sequence[Piece]) -> Iterator[Piece]:
        """Yields the pieces after the last compute task, without the times of REDUCE, APPLY and the like."""
        updates = [run for run in step.tasks if not run.task.kind.is_compute]
        cuts = sorted({moment for run in updates for moment in (run.begin, run.end)})
        last = max((run.end for run in updates), default=step.end)
        for piece in pieces:
            inner = [moment for moment in cuts if piece.begin < moment < piece.end]
            for begin, end in zip([piece.begin, *inner], [*inner, piece.end], strict=True):
                there = {KINDS[run.task.kind].part for run in updates if run.begin <= begin and end <= run.end}
                part = piece.part
                if there:
                    part = min(there, key=PARTS.index)
                elif part == "input" and end <= last:
                    part = "other"
                yield from _piece(part, begin, end)


def _piece(part: str, begin: int, end: int) -> Iterator[Piece]:
    if end > begin:
        yield Piece(part, begin, end)
