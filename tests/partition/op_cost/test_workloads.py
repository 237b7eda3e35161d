"""Public layer graphs, placed as a plan places its layers, and how their files are read."""

from __future__ import annotations

from typing import Any

import pytest

from smp_tf.partition.place.asked import Effort
from smp_tf.partition.place.place import place
from smp_tf.partition.place.placement import Placement, Ranks
from smp_tf.partition.units.cost import Flow
from tests.partition.workloads import Workload, branching, read, workload

#: Microbatches of which only the slowest stage counts.
MANY = 10**9


def placed(given: Workload, limit: float | None) -> Placement:
    ranks = Ranks.alike(given.stages, limit)
    effort = Effort(seconds=5.0)
    found = place(
        given.chain, given.needs, given.stages, objective="speed", microbatches=MANY, ranks=ranks, effort=effort
    )
    stage_of = found.placement.stage_of
    assert set(stage_of) == set(range(given.stages))
    assert all(stage_of[before] <= stage_of[after] for before, after in given.needs)
    assert found.placement.times == pytest.approx(given.loads(stage_of))
    assert found.placement.memory == pytest.approx(given.sizes(stage_of))
    assert limit is None or max(given.sizes(stage_of)) <= limit
    assert found.gap is not None
    assert found.gap <= 0.0051
    return found.placement


@pytest.mark.parametrize(
    ("name", "limit", "proved"),
    [
        ("bert24_inference", None, 17.790),
        ("bert24_inference", 395e6, 18.095),
        ("gnmt_inference", None, 32.911),
        ("gnmt_training", None, 107.004),
    ],
)
def test_placements_of_public_workloads_are_as_good_as_is_proved(name: str, limit: float | None, proved: float) -> None:
    """Within 0.5 %, which is no difference to a plan: for gnmt_inference that is what is known of cuts of one order."""
    given = workload(name)
    assert proved * (1 - 1e-4) <= max(placed(given, limit or given.limit).times) <= proved * 1.004


@pytest.mark.parametrize(("seed", "blocks", "units", "limited"), [(36, 30, 199, False), (51, 45, 310, True)])
def test_branching_training_graphs_of_some_hundred_units_are_placed_and_proved(
    seed: int, blocks: int, units: int, limited: bool
) -> None:
    """Of the first the solver found nothing in its time: it was told the cut's stages only, and looked for all else."""
    given = branching(seed, blocks, 6)
    assert len(given.chain.names) == units
    sizes = [weight.value for weight in given.chain.weights]
    placed(given, 1.1 * max(*sizes, sum(sizes) / given.stages) if limited else None)


def node(number: int, seconds: float, **more: Any) -> dict[str, Any]:
    return {"id": number, "fpgaLatency": seconds, "size": 10.0, **more}


def edge(source: int, target: int, cost: float) -> dict[str, Any]:
    return {"sourceId": source, "destId": target, "cost": cost}


#: a ─▶ b ─▶ c and back, with what a keeps for the backward pass of c.
FORWARD = [edge(1, 2, 0.5), edge(2, 3, 0.25), edge(1, 13, 0.5)]
NODES = [
    *(node(number, number, colorClass=number, isBackwardNode=0) for number in (1, 2, 3)),
    *(node(10 + number, 10.0 * number, colorClass=number, isBackwardNode=True) for number in (1, 2, 3)),
]


def test_forward_and_backward_of_a_class_are_one_unit_and_gradients_flow_back() -> None:
    found = read({"nodes": NODES, "edges": [*FORWARD, edge(13, 12, 2.0), edge(12, 11, 1.0)], "maxFPGAs": 2})
    assert found.chain.names == ("1+11", "2+12", "3+13")
    assert found.chain.times == (11.0, 22.0, 33.0)
    assert [weight.value for weight in found.chain.weights] == [20.0, 20.0, 20.0]
    assert found.needs == ((0, 1), (1, 2))
    assert found.chain.flows == (
        Flow(0, (1, 2), 0.5),
        Flow(1, (2,), 0.25),
        Flow(2, (1,), 2.0, backward=True),
        Flow(1, (0,), 1.0, backward=True),
    )
    assert found.loads((0, 0, 1)) == [33.0 + 0.5 + 0.25 + 2.0, 33.0 + 0.5 + 0.25 + 2.0]
    assert found.sizes((0, 0, 1)) == [40.0, 20.0]


def test_arrows_of_a_backward_pass_along_those_of_the_forward_pass_are_read_so() -> None:
    found = read({"nodes": NODES, "edges": [*FORWARD, edge(11, 12, 1.0), edge(12, 13, 2.0)], "maxFPGAs": 2})
    assert found.needs == ((0, 1), (1, 2))
    assert found.chain.flows[2:] == (Flow(0, (1,), 1.0, backward=True), Flow(1, (2,), 2.0, backward=True))


def test_units_in_a_circle_are_one() -> None:
    nodes = [node(1, 1.0, colorClass=7), node(2, 2.0), node(3, 4.0, colorClass=7), node(4, 8.0)]
    found = read({"nodes": nodes, "edges": [edge(1, 2, 1.0), edge(2, 3, 1.0), edge(3, 4, 1.0)], "maxFPGAs": 2})
    assert (found.chain.names, found.chain.times, found.needs) == (("1+2+3", "4"), (7.0, 8.0), ((0, 1),))
