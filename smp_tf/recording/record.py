"""`smp.timeline`: records what this rank does in some steps, and when, and writes a file.

   the program ─ know ─▶ what was planned ─┐
                                             ├─▶ RankRecord, on rank 0's clock ─▶ path/rank_3.json
    C++ recorder ─ stop ─▶ points in time ───┘

While steps are recorded, no Python code runs, and no graph differs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from smp_tf.announce import tell
from smp_tf.errors import TimelineError
from smp_tf.job import runtime
from smp_tf.job.at_shutdown import on_shutdown
from smp_tf.job_state import JobState
from smp_tf.ops import recorder
from smp_tf.partition.mesh import CommGroup
from smp_tf.partition.plan.plan import Plan
from smp_tf.partition.split.segment_graph import tensor_name
from smp_tf.pipeline.measure.recorded import ProgramRecord, RankRecord, steps_of
from smp_tf.pipeline.run.stage_program import StageProgram
from smp_tf.pipeline.run.step_tasks import edges_of
from smp_tf.recording import tensorboard, timeline_file

if TYPE_CHECKING:
    import os

    from smp_tf.ops.transport import Transport

#: How many questions compare a clock with that of rank 0. The answer that came soonest counts.
_QUESTIONS = 16


class RecordedProgram(Protocol):
    """What a recording needs to know of a built step."""

    @property
    def name(self) -> str:
        """Returns the name of the step."""

    @property
    def plan(self) -> Plan:
        """Returns the plan that the step follows."""

    @property
    def microbatches(self) -> int:
        """Returns the number of microbatches of a step."""

    @property
    def stage_program(self) -> StageProgram:
        """Returns this rank's part of the step."""


_programs: JobState[dict[int, RecordedProgram]] = JobState(dict)


def know(program: RecordedProgram) -> None:
    """Includes the steps of a program in recordings, from now on until `smp.shutdown`.

    Args:
        program: a program whose graph is built.
    """
    programs = _programs()
    if not programs:
        on_shutdown(_stop)
    programs[program.stage_program.number] = program
    recorder.count_program(program.stage_program.number)


def _stop() -> None:
    recorder.stop()


@contextlib.contextmanager
def timeline(path: str | os.PathLike[str], steps: Sequence[int] | None = None) -> Iterator[None]:
    """Records the steps that run in this context, and writes a file for each rank.

    Call it on every rank that is to be seen, with the same arguments. The file is `path/rank_<rank>.json`, in Chrome's
    trace format: chrome://tracing and https://ui.perfetto.dev show it, and `smp-tf timeline path --html out.html` makes
    a page of the files of all ranks. A step that is not split (one process, one microbatch) is not recorded.

    Args:
        path: folder for the files. It is made if it does not exist.
        steps: the first and the last step to record, counted from 0 where the context begins; None for all. Every call
            of a function made by `smp.step` is a step.

    Yields:
        Nothing.

    Raises:
        TimelineError: `steps` is no such pair, or a timeline is being recorded already.
        NotInitializedError: `smp.init` was not called.

    Example:
        >>> with smp.timeline("timeline", steps=(2, 4)):
        ...     for _ in range(6):
        ...         train(images, labels)
    """
    start(steps)
    try:
        yield
    except BaseException:
        recorder.stop()
        raise
    stop(path)


def start(steps: Sequence[int] | None = None) -> None:
    """Begins to record. `stop` ends it.

    Args:
        steps: the first and the last step to record, counted from 0; None for all.

    Raises:
        TimelineError: `steps` is no such pair, or a timeline is being recorded already.
    """
    runtime.current()
    first, last = check_steps(steps) if steps is not None else (0, None)
    if not recorder.start(first, last):
        raise TimelineError(
            "One timeline is recorded at a time, and one is being recorded. End the context of smp.timeline, or the "
            "training whose callback records, before the next one begins."
        )
    for number in _programs():
        recorder.count_program(number)


def check_steps(steps: Any) -> tuple[int, int]:
    """Returns the first and the last step of a recording.

    Args:
        steps: the argument of the recording.

    Raises:
        TimelineError: it is no pair of whole numbers from 0, or the first is above the last.
    """
    is_pair = isinstance(steps, Sequence) and len(steps) == 2 and all(type(step) is int for step in steps)
    if not is_pair or not 0 <= steps[0] <= steps[1]:
        raise TimelineError(
            f"steps is a pair (first, last) of whole numbers from 0, both recorded, such as (10, 12). "
            f"Received: {steps!r}."
        )
    return int(steps[0]), int(steps[1])


def stop(path: str | os.PathLike[str]) -> Path:
    """Ends the recording and writes this rank's file.

    Args:
        path: folder for the file.

    Returns:
        The file.
    """
    points, dropped = recorder.stop()
    running = runtime.current()
    topology = running.topology
    programs = {number: _as_recorded(program) for number, program in _programs().items()}
    steps = steps_of(points, programs, topology.stage)
    record = RankRecord(
        rank=topology.rank,
        stage=topology.stage,
        ranks=tuple(topology.members(CommGroup.PP_GROUP)),
        job=f"{topology.hosts[0]} {topology.pids[0]}",
        programs={number: programs[number] for number in sorted({step.program for step in steps})},
        steps=steps,
        dropped=dropped,
    )
    if dropped:
        tell(
            f"smp_tf: rank {topology.rank} recorded more than the {recorder.CAPACITY} moments that are kept; the last "
            f"{dropped} are missing from the timeline. Record fewer steps at a time."
        )
    file = Path(path) / f"rank_{topology.rank}.json"
    record = record.shifted(ahead_of_this(running.transport))
    timeline_file.write(file, [record])
    tensorboard.write(Path(path), record)
    return file


def ahead_of_this(transport: Transport | None) -> int:
    """Returns the nanoseconds by which rank 0's clock is ahead of this rank's.

    Rank 0 is asked for its time, whatever it does meanwhile. The result can be wrong by half of the time that the
    answer takes. A difference below that counts as none, as between processes of one host, which have one clock.

    Args:
        transport: transport of this rank.
    """
    if transport is None or transport.rank == 0:
        return 0
    return _offset(lambda: _time_of(transport), recorder.clock)


def _time_of(transport: Transport) -> int | None:
    status: Mapping[str, Any] | None = transport.ask(0)
    return None if status is None else int(status["clock_ns"])


def _offset(ask: Callable[[], int | None], clock: Callable[[], int]) -> int:
    best: tuple[int, int] | None = None
    for _ in range(_QUESTIONS):
        asked = clock()
        told = ask()
        took = clock() - asked
        if told is not None and (best is None or took < best[0]):
            best = took, told - asked - took // 2
    if best is None or abs(best[1]) * 2 <= best[0]:
        return 0
    return best[1]


def _as_recorded(program: RecordedProgram) -> ProgramRecord:
    split = program.stage_program.split
    tensors = {
        transfer.index: tensor_name(split.graph, transfer.tensor)
        for transfer in split.transfers
        if transfer.tensor is not None
    }
    planned = program.stage_program.planned
    return ProgramRecord(program.name, program.plan.schedule, planned, tuple(edges_of(split)), tensors)
