"""Tells once, on rank 0, what XLA was asked to compile and cannot compile."""

from __future__ import annotations

from smp_tf.announce import announce
from smp_tf.job import runtime
from smp_tf.job.exchange import allgather_json
from smp_tf.partition.mesh import CommGroup
from smp_tf.pipeline.run.stage_program import StageProgram


def report_uncompiled(step: str, program: StageProgram) -> None:
    """Says which parts of a step run without XLA, and why.

    Every rank of a replica calls it. The other replicas may have this program already, or never get it.

    Args:
        step: name of the step function.
        program: what this rank runs of the step.
    """
    mine = {
        f"{_in_words(sweep, part)} of {_where(program, chunk)}": function.uncompiled
        for (chunk, sweep, part), function in sorted(program.functions.items())
        if function.uncompiled is not None
    }
    everyone = allgather_json(mine, CommGroup.MP_GROUP, name=f"what XLA compiles of step {step!r}")
    parts = {part: reason for of_rank in everyone for part, reason in of_rank.items()}
    if parts:
        # The other lines only say where TensorFlow was in its sources.
        listed = "; ".join(f"{part}: {reason.partition(chr(10))[0]}" for part, reason in sorted(parts.items()))
        announce(
            f"xla is true, but XLA cannot compile all of step {step!r}. These parts run without it: {listed}",
            runtime.current().topology.rank,
        )


def _where(program: StageProgram, chunk: int) -> str:
    several = program.split.placement.count(program.stage) > 1
    return f"stage {program.stage}" + (f", chunk {chunk}" if several else "")


def _in_words(sweep: int, part: int) -> str:
    if sweep > 1:
        return f"the sweep {sweep}"
    return ("the backward pass" if not part else "the backward pass of the weights") if sweep else "the forward pass"
