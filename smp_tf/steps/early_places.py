"""Gives a model's variables their values before its first step, so that these can be saved or listed.

manager.restore()        nothing of the model is read yet
model.save_model(path)   each rank keeps a part of the variables early, and reads its values; rank 0 writes
the first step           plans as if nothing had been placed; what is elsewhere than by the plan moves, once

Where the restored checkpoint has as many partitions as this job, each stage keeps what it stored there, since the plan
will most likely be the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from smp_tf.checkpoint import pending
from smp_tf.job import exchange, runtime
from smp_tf.variables import assigned_values
from smp_tf.variables.decision import Decision
from smp_tf.variables.models import SplitModel, take_variables


def place_now(model: SplitModel) -> None:
    """Gives values to variables of which no step has decided yet who stores them. All ranks call it.

    Where there are none, nothing is done and nothing is sent.

    Args:
        model: a distributed model that is built.

    Raises:
        RankMismatchError: not every rank calls it.
        CheckpointError: a value that is to be restored does not fit, is missing or damaged, on any rank.
        OwnershipError: an earlier configuration has cut the model in another way.
    """
    take_variables(model)
    store, running = model._smp_store, runtime.current()
    undecided = store.undecided()
    if not undecided:
        return
    topology = running.topology
    stages = _stages([variable for variable, _ in undecided], topology.stages)
    names = [variable.name for variable, _ in undecided]
    exchange.agree(
        f"where the weights of model {model.name!r} are before its first step",
        {f"{number} {name}": stage for number, (name, stage) in enumerate(zip(names, stages, strict=True))},
        hint="Every rank makes this call, with the same model.",
    )
    decided = [
        Decision(variable, dataclasses.replace(known, stage=stage, chunk=stage), known, is_used=False, is_early=True)
        for (variable, known), stage in zip(undecided, stages, strict=True)
    ]
    store.require_cut(topology.stages, topology.stage)
    with assigned_values.unnoted():
        restored = pending.values_for(decided)
        store.settle(decided, topology.place, running.seed, restored, range(topology.stages))
        pending.take_what_exists()


def _stages(variables: Sequence[Any], stages: int) -> list[int]:
    """Returns the stage that keeps each variable: that of the checkpoint, or else equally many bytes for each."""
    there = [stage for stage in pending.stages_there(variables) if stage is not None]
    if len(there) == len(variables):
        return there
    sizes = [(variable.shape.num_elements() or 0) * variable.dtype.base_dtype.size for variable in variables]
    total, before, found = max(sum(sizes), 1), 0, []
    for size in sizes:
        found.append(min(stages * before // total, stages - 1))
        before += size
    return found
