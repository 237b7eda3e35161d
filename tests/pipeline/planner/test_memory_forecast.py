"""What each stage of a cut step is forecast to need, beside what the pipeline's replay says of tensors."""

from __future__ import annotations

import dataclasses

import pytest

from smp_tf.partition.plan.stage_forecast import Use
from smp_tf.pipeline.planner.cut import cut
from smp_tf.pipeline.planner.memory_forecast import optimizer_bytes, with_exact_transfers
from smp_tf.pipeline.planner.proposal import propose
from smp_tf.pipeline.planner.request import Aim, Course, PlacementRequest, Storage
from smp_tf.pipeline.planner.times_by_size import UnitTimes
from tests.partition.op_graph_builder import GraphBuilder, chain_of_dense
from tests.partition.uses_on_host import with_on_host

TWO = PlacementRequest(Course("simple", 2, 2), Storage(slots=0.0), Aim("memory"))


def received(request: PlacementRequest, *shares: float) -> int:
    """Bytes of messages that the last stage is forecast to hold, where stages take such shares of the time."""
    graph = chain_of_dense(4)
    plan = propose(graph, request.changed(times=UnitTimes()), {})
    rows = [dataclasses.replace(row, time_share=share) for row, share in zip(plan.forecast, shares, strict=True)]
    plan = dataclasses.replace(plan, forecast=tuple(rows))
    return with_exact_transfers(plan, cut(graph, plan), request).forecast[-1].transport_bytes


def test_what_lies_with_a_stage_is_forecast_for_stages_that_are_as_fast_as_estimated_and_for_equal_ones() -> None:
    """The first stage of the digits is not as slow as estimated: a message lay with the last one, 16 of its 97 MiB."""
    estimated = TWO.changed(schedule="interleaved", microbatches=4)
    assert received(estimated, 0.9, 0.1) == received(estimated, 0.5, 0.5) == 132
    # What was measured is known.
    measured = estimated.changed(times=UnitTimes({"net/dense_0": (0.9, 0.9)}))
    assert received(measured, 0.9, 0.1) == 16


@pytest.mark.parametrize(
    ("width", "layers", "made"),
    [
        # Six kernels of 256 KiB a stage, of which two are updated at a time; of forty an eighth. Of each two tensors.
        (256, 12, [4 << 18] * 2),
        (256, 80, [10 << 18] * 2),
        # All that are small, but no more than there are gradients.
        (8, 12, [6 * 256] * 2),
    ],
)
def test_an_optimizer_makes_something_for_few_weights_at_a_time(width: int, layers: int, made: list[int]) -> None:
    """Bug: as much as all gradients was counted, and a stage of 12 dense layers was forecast 16 % too large."""
    graph = chain_of_dense(layers, width)
    plan = propose(graph, TWO, {})
    done = cut(graph, plan)
    rows = plan.forecast
    assert [optimizer_bytes(stage, row, done, in_buckets=False) for stage, row in enumerate(rows)] == made
    # What is averaged on the host comes back beside it, unless it is used there.
    on_host = with_on_host(rows[0], Use.GRADIENTS)
    assert optimizer_bytes(0, on_host, done, in_buckets=False) == made[0] + on_host.gradient_bytes
    assert optimizer_bytes(0, with_on_host(rows[0], Use.GRADIENTS, Use.SLOTS), done, in_buckets=False) == made[0]
    # Buckets of gradients do not wait for each other.
    assert optimizer_bytes(0, rows[0], done, in_buckets=True) == rows[0].gradient_bytes


def test_with_replicas_all_weights_may_be_under_way() -> None:
    graph = chain_of_dense(12, 256)
    request = TWO.changed(replicas=2)
    plan = propose(graph, request, {})
    one, two = (with_exact_transfers(plan, cut(graph, plan), each).forecast[0].working_bytes for each in (TWO, request))
    # Six gradients of 256 KiB for four, and a fourteenth.
    assert two - one == pytest.approx(2 * (1 + 1 / 14) * 2**18, abs=2)


@pytest.mark.parametrize(("slots", "tables"), [(2.0, 5), (0.0, 0)])
def test_slots_of_a_table_with_sparse_gradients_are_copied_whole(slots: float, tables: int) -> None:
    """Bug: a table whose gradient has few rows was taken to need no more than these rows while it is updated."""
    b = GraphBuilder()
    table = b.variable("net/table", (1000, 64))
    rows, ids = b.argument((8, 64)), b.argument((8,), "int32")
    layer = b.call("net/table", b.call("net"))
    used = b.add("ResourceGather", table, ids, call=layer, shape=(8, 64))
    values = b.add("Mul", rows, used, call=layer, shape=(8, 64))
    b.gradient(table, values, ids, b.add("Const", call=layer, shape=(2,), dtype="int64"))
    graph = b.graph(values)
    request = PlacementRequest(Course("simple", 1, 2), Storage(slots=slots), Aim("memory"))
    plan = propose(graph, request, {})
    made = optimizer_bytes(0, plan.forecast[0], cut(graph, plan), in_buckets=False)
    # Besides it, rows are added up and scaled.
    assert made == tables * 1000 * 64 * 4 + 2 * plan.forecast[0].gradient_bytes
