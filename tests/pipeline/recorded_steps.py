"""Recorded steps as they would come of a simulated one."""

from __future__ import annotations

from smp_tf.pipeline.measure.recorded import Message, ProgramRecord, RecordedStep, TaskRun
from smp_tf.pipeline.programs.chunk_times import ChunkTimes
from smp_tf.pipeline.programs.simulate import SimulatedStep, simulate
from smp_tf.pipeline.programs.transfers import add_transfers
from smp_tf.pipeline.schedules.schedule import build
from smp_tf.pipeline.task import Edge, Kind


def edges(stages: int) -> list[Edge]:
    """Between neighbours one edge forward and one backward; the loss goes from the last stage to the first."""
    found = [Edge(i, i, 0, i + 1, 0) for i in range(stages - 1)]
    found += [Edge(stages + i, i + 1, 1, i, 1) for i in range(stages - 1)]
    return [*found, Edge(2 * stages, stages - 1, 0, 0, None)] if stages > 1 else []


def program(stages: int = 2, microbatches: int = 3, schedule: str = "interleaved") -> ProgramRecord:
    own = tuple(edges(stages))
    planned = add_transfers(build(schedule, stages, microbatches), own)
    return ProgramRecord("train", schedule, planned, own, {0: "net/first/Relu:0"})


def recorded(
    record: ProgramRecord, times: list[ChunkTimes], comm: float = 0.0, begins: dict[int, int] | None = None
) -> tuple[list[RecordedStep], SimulatedStep]:
    """A step as simulated, on every stage, and the simulation.

    Args:
        record: what is planned.
        times: of the chunks.
        comm: how long a message takes.
        begins: when ranks begin the step, where that is not at 0; what runs is not put off by it.
    """
    timeline = simulate(record.planned, times, record.edges, comm=comm)
    chunk_of = {edge.index: (edge.src_chunk, edge.dst_chunk) for edge in record.edges}
    sent = {
        (span.task.edge, span.task.microbatch): int(span.start)
        for spans in timeline.spans
        for span in spans
        if span.task.kind is Kind.SEND
    }
    steps = []
    for stage, spans in enumerate(timeline.spans):
        tasks = [TaskRun(s.task, int(s.start), int(s.end)) for s in spans if s.task.kind.is_compute]
        messages = []
        for span in (s for s in spans if s.task.kind.is_transfer):
            assert span.task.edge is not None
            peer = chunk_of[span.task.edge][span.task.kind is Kind.SEND]
            messages.append(Message(span.task, peer, int(span.start), int(span.end), 64))
            assert span.end >= sent[span.task.edge, span.task.microbatch]
        end = max([run.end for run in tasks] + [m.end for m in messages if m.task.kind is Kind.RECV])
        steps.append(RecordedStep(5, 10, (begins or {}).get(stage, 0), end, end, tuple(tasks), tuple(messages)))
    return steps, timeline
