"""Of no op of the models that training is tested with is the cost a guess."""

from __future__ import annotations

from typing import Any

import pytest

import smp_tf as smp
from smp_tf.offline.plan import offline
from smp_tf.partition.rewrite.prune import prune
from smp_tf.partition.units.cost import estimate
from smp_tf.pipeline.planner.units import units_of
from tests.distributed.cases.equality import make_model
from tests.distributed.models import MODELS, forward_backward
from tests.full_only import params


@pytest.mark.parametrize("name", params(MODELS, ["resnet50", "mobilenet_v2"]))
def test_every_op_has_a_cost_of_its_own(name: str, keras_defaults: None) -> None:
    entry = MODELS[name]
    entry.prepare()
    with offline():
        net = make_model(entry)

        @smp.step
        def step(batch: Any) -> Any:
            return forward_backward(entry, net, batch)

        graph = prune(step.trace(entry.batch(0)).graph)
        units = units_of(graph)
        costs = estimate(graph, units)
    assert costs.defaulted == ()
    assert len(units) > 1
    assert all(cost.seconds.forward > 0 for cost, unit in zip(costs.units, units, strict=True) if unit.variables)
