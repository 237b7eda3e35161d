"""What a rank proposes: here, which schedule."""

from __future__ import annotations

import dataclasses

import pytest

from smp_tf import planning, proposal
from smp_tf.errors import MemoryLimitError
from smp_tf.partition.op_graph import OpGraph
from smp_tf.partition.placement import Ranks
from smp_tf.partition.plan import Plan
from smp_tf.pipeline.schedule import RUNNABLE
from tests.partition.op_graph_builder import chain_of_dense

GRAPH = chain_of_dense(8, batch=16)


def proposed(graph: OpGraph, schedule: str, stages: int, microbatches: int, limit: float | None = None) -> Plan:
    ranks = Ranks.alike(stages, limit)
    request = planning.PlacementRequest(stages, microbatches, schedule, "memory", 0.0, ranks=ranks)
    return proposal.propose(graph, request, {})


def needed(schedule: str, stages: int, microbatches: int) -> int:
    plan = proposed(GRAPH, schedule, stages, microbatches)
    exact = planning.with_exact_transfers(plan, planning.cut(GRAPH, plan))
    return max(row.stored_bytes for row in exact.forecast)


def test_the_fastest_schedule_is_taken_and_the_others_are_told() -> None:
    plan = proposed(GRAPH, "auto", 2, 4)
    assert plan.schedule == "zb_h1"
    assert plan.reasons[-1] == "schedule zb_h1: interleaved takes 28% longer, simple takes 12% longer"
    assert dataclasses.replace(plan, reasons=()) == dataclasses.replace(proposed(GRAPH, "zb_h1", 2, 4), reasons=())


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 8), (4, 1)])
def test_where_all_are_the_same_the_first_is_taken_without_a_word(stages: int, microbatches: int) -> None:
    plan = proposed(GRAPH, "auto", stages, microbatches)
    assert (plan.schedule, plan.reasons) == ("interleaved", ())


def test_what_does_not_fit_is_not_taken() -> None:
    sizes = {kind: needed(kind, 4, 8) for kind in RUNNABLE}
    assert sizes["interleaved"] < sizes["zb_h1"] < sizes["simple"]
    plan = proposed(GRAPH, "auto", 4, 8, sizes["interleaved"])
    assert plan.schedule == "interleaved"
    assert plan.reasons[-1] == "schedule interleaved: zb_h1 does not fit, simple does not fit"
    assert proposed(GRAPH, "auto", 4, 8, sizes["zb_h1"]).schedule == "zb_h1"


def test_where_none_fits_the_error_is_that_of_the_leanest() -> None:
    with pytest.raises(MemoryLimitError) as auto:
        proposed(GRAPH, "auto", 4, 8, 5000.0)
    with pytest.raises(MemoryLimitError) as interleaved:
        proposed(GRAPH, "interleaved", 4, 8, 5000.0)
    assert str(auto.value) == str(interleaved.value)
