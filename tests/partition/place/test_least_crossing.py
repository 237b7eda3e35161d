"""What any placement sends at least, by the units whose stages are all but given: against all placements."""

from __future__ import annotations

import pytest

from smp_tf.partition.place.least_crossing import least_crossing
from smp_tf.partition.place.placement import Chain
from smp_tf.partition.place.trade import sent_bytes
from smp_tf.partition.units.cost import Flow, Weight
from tests.partition.chains import names, placements
from tests.partition.place.test_fewest_bytes import random_graph


def test_the_least_cut_between_units_whose_stages_are_given() -> None:
    flows = (Flow(0, (1,), 9.0), Flow(1, (2,), 4.0), Flow(2, (3,), 6.0), Flow(3, (2,), 5.0))
    chain = Chain(names(4), (1.0,) * 4, flows)
    needs = [(0, 1), (1, 2), (2, 3)]
    assert least_crossing(chain, needs, ([0, 0, 0, 1], [0, 1, 1, 1]), 2, 1) == 4.0
    # Where the second unit is surely before the border and the third after it, it is the same; else what is left.
    assert least_crossing(chain, needs, ([0, 0, 1, 1], [0, 0, 1, 1]), 2, 1) == 4.0
    assert least_crossing(chain, needs, ([0, 0, 0, 1], [0, 0, 0, 1]), 2, 1) == 11.0
    assert least_crossing(chain, needs, ([0, 0, 0, 0], [1, 1, 1, 1]), 2, 1) == 0.0


def test_a_tensor_of_two_readers_and_a_shared_weight_cross_once() -> None:
    flows = (Flow(0, (1, 2), 8.0),)
    weights = (Weight(0, (0, 1, 2), 6.0, 6.0, 0.0),)
    chain = Chain(names(3), (1.0,) * 3, flows, weights=weights)
    assert least_crossing(chain, [(0, 1), (0, 2)], ([0, 1, 1], [0, 1, 1]), 2, 4) == 8.0 + 12.0 / 4
    # A unit that may be on a third stage counts at no border. Where it surely is there, both are sent there, too.
    assert least_crossing(chain, [(0, 1), (0, 2)], ([0, 1, 0], [0, 1, 2]), 3, 4) == 8.0 + 12.0 / 4
    assert least_crossing(chain, [(0, 1), (0, 2)], ([0, 1, 2], [0, 1, 2]), 3, 4) == 2 * (8.0 + 12.0 / 4)


@pytest.mark.parametrize("stages", [2, 3])
def test_no_placement_sends_less(stages: int) -> None:
    """Windows of one or two stages around a placement, and all placements within them."""
    near = 0
    for seed in range(12):
        chain, needs = random_graph(seed)
        every = placements(7, needs, stages).tolist()
        around = every[(seed * 7919) % len(every)]
        first = [max(0, at - (unit + seed) % 2) for unit, at in enumerate(around)]
        last = [min(stages - 1, at + (unit + seed) % 3 % 2) for unit, at in enumerate(around)]
        inside = [one for one in every if all(a <= at <= b for a, at, b in zip(first, one, last, strict=True))]
        least = min(sent_bytes(chain, one, 4) for one in inside)
        bound = least_crossing(chain, needs, (first, last), stages, 4)
        assert bound <= least * (1 + 1e-9)
        near += bound >= 0.9 * least
    assert near >= (12 if stages == 2 else 1)
