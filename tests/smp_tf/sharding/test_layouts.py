"""Which layout of a variable is in force: by what the job shares, and by the optimizer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf
import tf_keras

from smp_tf.job import runtime
from smp_tf.job.topology import Topology
from smp_tf.partition.layout import Layout
from smp_tf.partition.mesh import Mesh
from smp_tf.partition.spread import EVERYWHERE, Partial, SplitOver, Spread, Whole
from smp_tf.sharding import layouts
from smp_tf.variables.store import storage_of
from tests.smp_tf.variables.test_store import deferred, two_weights

ROWS = SplitOver("D", 0, (0, 1, 3), keeper=1)
OF_ONE = Layout(0, 0, gradient=Whole("D", 1, 2), slots=Whole("D", 1, 2))
OF_ROWS = Layout(0, 0, slots=ROWS)
PLAIN = Layout(0, 0)


@pytest.fixture
def decided() -> dict[Layout, Any]:
    """Variables of a model, by the layout that was decided for them. They are there as long as their store is."""
    store, (first, second) = deferred(two_weights)
    for variable, layout in ((first, OF_ONE), (second, OF_ROWS)):
        storage_of(variable).layout = layout
    return {OF_ONE: first, OF_ROWS: second, PLAIN: store}


def job(monkeypatch: pytest.MonkeyPatch, replicas: int = 2, **config: Any) -> None:
    """From now on this is the second replica of a job."""
    given = {"shard_optimizer_state": True, "gradient_offload": False, "gradient_compression": None, **config}
    ranks = ("host",) * replicas
    topology = Topology(Mesh(replicas, 1), min(1, replicas - 1), 0, replicas, ranks, (1,) * replicas)
    running = SimpleNamespace(config=SimpleNamespace(**given), topology=topology)
    monkeypatch.setattr(runtime, "current", lambda: running)
    monkeypatch.setattr(runtime, "current_or_none", lambda: running)


@pytest.mark.parametrize(
    ("config", "of_one", "of_rows"),
    [
        ({}, OF_ONE, OF_ROWS),
        # All replicas get all averages: on the host they are summed in equal parts.
        ({"gradient_offload": True}, Layout(0, 0, slots=OF_ONE.slots), OF_ROWS),
        ({"shard_optimizer_state": False}, PLAIN, PLAIN),
        ({"replicas": 3}, PLAIN, PLAIN),
        ({"replicas": 1}, PLAIN, PLAIN),
        (
            {"shard_optimizer_state": False, "gradient_compression": "1bit"},
            Layout(0, 0, gradient=Partial("D")),
            Layout(0, 0, gradient=Partial("D")),
        ),
    ],
)
def test_a_layout_holds_in_a_job_that_shares_as_it_says(
    config: dict[str, Any],
    of_one: Layout,
    of_rows: Layout,
    decided: dict[Layout, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job(monkeypatch, **config)
    assert layouts.layout_of(decided[OF_ONE]) == of_one
    assert layouts.layout_of(decided[OF_ROWS]) == of_rows


def test_without_a_job_nothing_is_shared(decided: dict[Layout, Any]) -> None:
    assert layouts.layout_of(decided[OF_ONE]) == PLAIN
    assert layouts.here() == {"P": 0, "D": 0, "T": 0}


def test_a_variable_of_the_script_is_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    job(monkeypatch)
    assert layouts.layout_of(tf.Variable(1.0)) == Layout()
    assert layouts.slots_of(tf.Variable(1.0), tf_keras.optimizers.SGD()) == EVERYWHERE


@pytest.mark.parametrize(
    ("optimizer", "of_rows"),
    [
        # It is not known whether it goes by rows.
        (None, EVERYWHERE),
        (tf_keras.optimizers.Adam(1e-3), ROWS),
        (tf_keras.optimizers.Adam(1e-3, clipnorm=0.5), Whole("D", 1, 2)),
    ],
)
def test_slots_of_rows_are_those_of_an_optimizer_that_updates_rows(
    optimizer: Any, of_rows: Spread, decided: dict[Layout, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job(monkeypatch)
    assert layouts.slots_of(decided[OF_ONE], optimizer) == Whole("D", 1, 2)
    assert layouts.slots_of(decided[OF_ROWS], optimizer) == of_rows
    assert layouts.here() == {"P": 0, "D": 1, "T": 0}
