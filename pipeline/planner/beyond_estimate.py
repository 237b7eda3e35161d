"""How many more bytes units need while they run than is estimated, by what was measured of them.

What a unit has at most while it runs by itself is measured, and estimated in the same way as for a whole stage. While
the unit runs within a stage, it needs as much more or less than estimated:

                            a unit by itself          within a stage, by estimate    and as measured
    estimated               ▄▄▄▄▄▄▄▄ 8 MiB            what else is there + 8
    measured                ▄▄▄▄▄▄▄▄▄▄▄ 11 MiB                                       what else is there + 8 + 3
"""

from __future__ import annotations

from collections.abc import Mapping

from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.split.working_set import segment_memory
from smp_tf.partition.units.cost import node_seconds
from smp_tf.partition.units.units import build_units
from smp_tf.pipeline.planner.cut import cut_into_units
from smp_tf.pipeline.planner.unit_peaks import BeyondEstimate, UnitPeaks


def beyond_estimate(graph: OpGraph, peaks: UnitPeaks, samples: int) -> dict[str, tuple[int, int]]:
    """Returns how many more bytes units need forward and backward than is estimated, below 0 for fewer, by unit.

    Args:
        graph: the pruned op graph of a step. The units are those of this step.
        peaks: what was measured.
        samples: samples of the microbatch that was measured.
    """
    if not peaks.bytes:
        return {}
    units, done = cut_into_units(graph)
    seconds = node_seconds(done.graph, unknown=samples)
    summed = [tensor for output in done.outputs if output.is_summed for tensor in output.summands or (output.tensor,)]
    estimates: dict[tuple[int, bool], int] = {}
    for visit, segment in done.segments.items():
        most = segment_memory(done.graph, segment, seconds, summed, samples, peaks.counted_from).working.large
        key = visit.chunk, visit.sweep > 0
        estimates[key] = max(most, estimates.get(key, 0))
    return {
        unit.name: (
            peaks.bytes[unit.name][0] - estimates.get((unit.index, False), 0),
            peaks.bytes[unit.name][1] - estimates.get((unit.index, True), 0),
        )
        for unit in units
        if unit.name in peaks.bytes
    }


def by_node(graph: OpGraph, beyond: Mapping[str, tuple[int, int]]) -> BeyondEstimate:
    """Returns how many more bytes are needed while the nodes of a step run than is estimated.

    Args:
        graph: the pruned op graph of any step of the model, for microbatches of as many samples.
        beyond: how many more bytes units need forward and backward than is estimated, by unit.
    """
    if not beyond:
        return BeyondEstimate()
    # The loss is not part of the last unit here, since it may be another one than was measured with that.
    nodes = {
        graph.nodes[number].name: more
        for unit in build_units(graph)
        if unit.name in beyond
        for numbers, more in zip((unit.nodes, unit.backward), beyond[unit.name], strict=True)
        for number in numbers
    }
    return BeyondEstimate(nodes, frozenset(beyond))
