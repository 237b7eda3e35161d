"""Forecasts the part of each stage's memory that TensorFlow's allocator counts on a processor.

The allocator of a processor counts tensors of 256 KiB or more. A loop over short sequences, or a convolution of small
images, makes many smaller ones. They take memory as well, so a plan counts them, but what is measured does not.
"""

from __future__ import annotations

import dataclasses

from smp_tf.partition.plan.plan import Plan
from smp_tf.partition.plan.stage_forecast import StageForecast, Use
from smp_tf.partition.split.split import Split
from smp_tf.pipeline.planner.memory_forecast import held_and_large, with_held
from smp_tf.pipeline.planner.request import PlacementRequest
from smp_tf.pipeline.planner.updates_at_once import LARGE


def exact_and_counted(plan: Plan, done: Split, request: PlacementRequest) -> tuple[Plan, tuple[int, ...]]:
    """Returns what `with_exact_transfers` returns, and the bytes of each stage that a processor's allocator counts.

    Args:
        plan: the plan.
        done: the step, cut by the plan.
        request: the request that the plan was made for.
    """
    # The step is followed once for both.
    held, large = held_and_large(plan, done, request, LARGE)
    exact = with_held(plan, done, request, held)
    rows = tuple(_without_small(stage, row, done) for stage, row in enumerate(exact.forecast))
    counted = with_held(dataclasses.replace(exact, forecast=rows), done, request, large, LARGE)
    return exact, tuple(row.device_bytes for row in counted.forecast)


def _without_small(stage: int, row: StageForecast, done: Split) -> StageForecast:
    """Returns the forecast without small variables, and without their gradients and slots."""
    owners, placement = done.assignment.owners, done.placement
    trained = {gradient.variable for gradient in done.graph.gradients}
    sizes = {
        variable.index: variable.type.nbytes()
        for variable, owner in zip(done.graph.variables, owners, strict=True)
        if owner is not None and placement[owner] == stage
    }
    small = {index: size for index, size in sizes.items() if size < LARGE}
    of_trained = sum(size for index, size in small.items() if index in trained)
    # A slot is as large as its weight.
    slots = row.slot_bytes / (sum(size for index, size in sizes.items() if index in trained) or 1)
    less = {Use.WEIGHTS: sum(small.values()), Use.GRADIENTS: of_trained, Use.SLOTS: int(slots * of_trained)}
    return row.with_memory({use: max(0, row.memory[use] - count) for use, count in less.items()})
