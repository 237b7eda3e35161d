"""Placements that the script gives by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

from smp_tf.partition.errors import PlacementError
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.units.units import Unit
from smp_tf.pipeline.planner.request import PlacementRequest
from smp_tf.pipeline.planner.units import units_of


def placed_by_script(units: Sequence[Unit], request: PlacementRequest, decided: bool) -> list[int | None]:
    """Returns the stage that the script asked for each unit, or None.

    Args:
        units: those of the step.
        request: what the script asks for besides.
        decided: whether an earlier step has placed variables of this step, which may use a part of the models.

    Raises:
        PlacementError: there is no such stage; or all units are placed, and data would come back to a stage, or a stage
            has no unit.
    """
    if request.course.stages == 1:
        return [None] * len(units)
    _require_partitions(units, request.course.stages)
    if request.fixed.default is None:
        return [unit.stage for unit in units]
    placed, runs = _by_hand(units, request.fixed.default), request.course.chunks.are_stages
    for (before, first), (unit, second) in pairwise(zip(units, placed, strict=True)):
        if second < first and runs and not decided:
            raise PlacementError(
                f"auto_partition is false, and {unit.name!r} is {_why(unit, second)}, while what comes before it, "
                f"{before.name!r}, is {_why(before, first)}. Every partition is one run of the layers in the order in "
                f"which data flows: it cannot come back to an earlier partition. Place both with smp.partition, in "
                f"order, or set contiguous to false."
            )
    empty = sorted(set(range(request.course.stages)) - set(placed))
    if empty and not decided:
        raise PlacementError(
            f"auto_partition is false, and no layer is on partition {', '.join(map(str, empty))} of "
            f"{request.course.stages}. Place one there with smp.partition, or use fewer partitions."
        )
    return list(placed)


def placement_by_hand(graph: OpGraph, request: PlacementRequest) -> tuple[int, ...] | None:
    """Returns the stage of every chunk where the script's layers come back to a partition; None elsewhere.

    Args:
        graph: the pruned op graph.
        request: what the script asks for besides.

    Raises:
        PlacementError: they come back to a partition, and another partition has no layer.
    """
    units = units_of(graph)
    _require_partitions(units, request.course.stages)
    by_script = [unit.stage for unit in units if unit.stage is not None]
    placed = by_script if request.fixed.default is None else _by_hand(units, request.fixed.default)
    runs = tuple(stage for stage, _ in groupby(placed))
    if all(first < second for first, second in pairwise(runs)):
        return None
    empty = sorted(set(range(request.course.stages)) - set(runs))
    if empty:
        raise PlacementError(
            f"smp.partition comes back to a partition, as contiguous = false allows, and no layer is on partition "
            f"{', '.join(map(str, empty))} of {request.course.stages}. Place one there, or use fewer partitions."
        )
    return runs


def _require_partitions(units: Sequence[Unit], stages: int) -> None:
    """Raises an error where the script has placed a unit on a partition that does not exist."""
    for unit in units:
        if unit.stage is not None and not 0 <= unit.stage < stages:
            raise PlacementError(
                f"{unit.name!r} was placed on partition {unit.stage}. There are {stages}: use 0 to {stages - 1}."
            )


def _by_hand(units: Sequence[Unit], default: int) -> list[int]:
    return [default if unit.stage is None else unit.stage for unit in units]


def _why(unit: Unit, stage: int) -> str:
    if unit.stage is None:
        return f"outside any smp.partition, and so on default_partition {stage}"
    return f"on partition {stage}"
