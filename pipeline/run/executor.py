"""Writes one rank's program of a step into the graph that is being traced.

The task list decides what runs, and in which order. The table of `emitters` says who writes the ops of each kind.
Control edges chain compute tasks. Sends and receives depend on data and on their place in the list, so they overlap
with compute:

    begin ─▶ clear sums ─▶ F0 ─▶ F1 ─▶ B0 ─▶ F2 ─▶ B1 ─▶ B2 ─▶ take sums ─▶ computed ─▶ end
                            └▶S0.0└▶S0.1  ▲         ▲               └─▶ reduce ──────────▲
                                   R1.0 ──┘  R1.1 ──┘      (a receive is posted one task before its reader)

TensorFlow's automatic control dependencies would chain sends and receives in program order, which deadlocks two ranks
that wait for each other. So every op made here is exempt from them. Two fences hold the handles of all variables, one
at the begin and one where all is computed. They order the step against what the caller does before and after it. So an
optimizer changes the weights of one bucket while others are still averaged. The next step begins after the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from smp_tf.ops import send_recv
from smp_tf.ops.at_run_time import at_run_time
from smp_tf.pipeline.programs.kinds import KINDS, Phase
from smp_tf.pipeline.run.emission import CallersPart, Emission
from smp_tf.pipeline.run.emitters import EMITTERS
from smp_tf.pipeline.run.stage_program import StageProgram


@dataclass
class StepResults:
    """What a rank's program produced, by position in the graph's outputs.

    Args:
        values: for each output, one tensor per microbatch; None where another rank keeps them.
        accumulated: for each gradient, the sum over microbatches (and replicas) of weight x value; None for other
            outputs.
        step: number of the step, an int64 scalar tensor.
        computed: an op that has run when all of this rank has run except the averages over replicas. Then variables may
            change.
        buckets: the bucket in which a gradient was averaged over the replicas, by position.
        emission: what is known of the program's ops.
    """

    values: list[list[tf.Tensor] | None]
    accumulated: list[tf.Tensor | None]
    step: tf.Tensor
    computed: tf.Operation
    buckets: Mapping[int, int]
    emission: Emission


def emit(
    program: StageProgram,
    arguments: Callable[[int, int], tf.Tensor],
    captures: Sequence[tf.Tensor],
    seed: Callable[[int], tf.Tensor],
    weights: Sequence[Any],
    callers: CallersPart | None = None,
) -> StepResults:
    """Writes the program into the current graph.

    Args:
        program: this rank's program.
        arguments: returns argument tensor number i of microbatch m.
        captures: the outside tensors of CAPTURE nodes.
        seed: returns the random seed of microbatch m, int64[2].
        weights: weight of each microbatch in sums (scalars), where the program is weighted.
        callers: writes the tasks whose content only the caller knows; None where the list has none.

    Returns:
        The outputs that this rank has.
    """
    split = program.split
    handles = [v.handle for v in program.variables.values()]
    step = send_recv.begin_step(handles, program.number)
    emission = Emission(program, arguments, captures, seed, weights, step, callers or CallersPart())
    emission.clear_sums()
    emission.begin_replica_sums()
    for task in program.tasks:
        if KINDS[task.kind].phase is Phase.STEP:
            EMITTERS[task.kind](emission, task)
    accumulated = [emission.total(position) for position in range(len(split.outputs))]
    with tf.control_dependencies(emission.all_ops):
        computed = at_run_time(step, handles).op
    with tf.control_dependencies([computed, *emission.averages]):
        send_recv.end_step(program.number)
    values: list[list[tf.Tensor] | None] = []
    for output in split.outputs:
        per_microbatch = [emission.values.get((output.tensor, m)) for m in range(program.microbatches)]
        is_sum = output.tensor in program.sums.tensors - program.sums.kept
        values.append(None if is_sum or any(v is None for v in per_microbatch) else per_microbatch)
    dense = [bucket for bucket in program.buckets if not bucket.is_sparse]
    buckets = {position: bucket.number for bucket in dense for position in bucket.positions}
    return StepResults(values, accumulated, step, computed, buckets, emission)


class LastTasks:
    """Writes the last tasks of a program, which are those of what comes after the step in its graph.

    A script's own loop calls the optimizer itself, after the step; then the updates are the script's to write.

    Args:
        results: what the program produced.
    """

    def __init__(self, results: StepResults) -> None:
        self._emission = results.emission

    def update(self, write: Callable[[], None]) -> None:
        """Writes the update of weights.

        Args:
            write: lets the optimizers write theirs, of all weights.
        """
        self._emission.update = write
        self._write(Phase.UPDATE)
        if self._emission.update is not None:
            # A rank that updates nothing has none of these tasks, and its optimizer counts the step all the same.
            write()

    def join(self, write: Callable[[], Any]) -> Any:
        """Writes what brings together the samples of all replicas, and returns it.

        Args:
            write: writes it.
        """
        self._emission.join = write
        return self._emission.joined if self._write(Phase.JOIN) else write()

    def log(self, write: Callable[[], Any]) -> Any:
        """Writes the average over the replicas of what is logged, and returns it.

        Args:
            write: writes it.
        """
        self._emission.log = write
        return self._emission.logged if self._write(Phase.LOG) else write()

    def _write(self, phase: Phase) -> bool:
        """Writes the tasks of a phase, and returns whether the list has any."""
        tasks = [task for task in self._emission.program.tasks if KINDS[task.kind].phase is phase]
        for task in tasks:
            EMITTERS[task.kind](self._emission, task)
        return bool(tasks)
