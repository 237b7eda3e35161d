"""Who keeps which slots: every rank decides the same, of the variables of all stages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from smp_tf.job import runtime
from smp_tf.job.topology import Topology
from smp_tf.job_state import JobState
from smp_tf.partition.layout import Layout
from smp_tf.partition.mesh import CommGroup, Mesh
from smp_tf.partition.spread import EVERYWHERE, SplitOver, Whole
from smp_tf.replicas.reduce_scatter import Receiver
from smp_tf.sharding import receivers, shares
from tests.smp_tf.rank_threads import Ranks

REPLICAS = 2


def job_of(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on this is a rank of two stages and two replicas, in a new job."""
    topology = Topology(Mesh(4, 2), rank, rank, 4, ("host",) * 4, (1,) * 4)
    config = SimpleNamespace(shard_optimizer_state=True, gradient_offload=False)
    running = SimpleNamespace(config=config, topology=topology)
    monkeypatch.setattr(runtime, "current", lambda: running)
    monkeypatch.setattr(runtime, "current_or_none", lambda: running)
    monkeypatch.setattr(shares, "_state", JobState(shares._State))


def test_every_rank_decides_the_same_of_the_variables_of_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"bias 0": [4], "table": [1 << 16, 2], "kernel 1": [64, 8], "bias 1": [8], "kernel 0": [16, 4]}
    made = {name: tf.Variable(tf.zeros(shape), name=name) for name, shape in shapes.items()}
    stages = {name: 0 if name in ("bias 0", "kernel 0", "table") else 1 for name in shapes}
    placed = [(variable, Layout(stages[name], stages[name])) for name, variable in made.items()]
    first, second = Whole("D", 0, REPLICAS), Whole("D", 1, REPLICAS)
    wanted = {
        "bias 0": Layout(0, 0, EVERYWHERE, second, second),
        # Whole it would make the shares unequal. An optimizer that updates no rows has it on the emptier replica.
        "table": Layout(0, 0, slots=SplitOver("D", 0, (0, 32753, 65536), keeper=1)),
        "kernel 0": Layout(0, 0, EVERYWHERE, first, first),
        "kernel 1": Layout(1, 1, EVERYWHERE, first, first),
        "bias 1": Layout(1, 1, EVERYWHERE, second, second),
    }
    for rank in range(4):
        job_of(rank, monkeypatch)
        found = shares.share(placed)
        assert {name: found[id(variable.handle)] for name, variable in made.items()} == wanted
        # What was decided for as many replicas stays.
        again = [(variable, found[id(variable.handle)]) for variable, _ in placed]
        assert shares.share(again) == {}


def test_what_is_decided_later_goes_where_less_is(monkeypatch: pytest.MonkeyPatch) -> None:
    job_of(0, monkeypatch)
    found = []
    for size, stage in ((8, 0), (2, 0), (2, 0), (8, 1)):
        layouts = shares.share([(tf.Variable(tf.zeros([size])), Layout(stage, stage))])
        found += [layout.slots.only for layout in layouts.values()]
    assert found == [0, 1, 1, 0]


def test_all_ranks_know_which_gradients_one_replica_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas of stage 1 do not agree on one of their gradients, which they say to the ranks of stage 0 as well."""
    ranks = Ranks(monkeypatch, 4, 2)
    monkeypatch.setattr(runtime, "current", ranks.current)

    def on(rank: int) -> Any:
        stage, replica = ranks.current().topology.stage, ranks.current().topology.replica
        own = {0: Receiver(second, 8)} if stage == 0 else {1: in_rows, 2: Receiver((first, second)[replica], 8)}
        return receivers.agreed_receivers(own, "train")

    first, second = Whole("D", 0, REPLICAS), Whole("D", 1, REPLICAS)
    in_rows = Receiver(SplitOver("D", 0, (0, 2, 4)), 12)
    of_stage_0 = ({0: Receiver(second, 8)}, {0, 1})
    of_stage_1 = ({1: in_rows}, {0, 1})
    assert Mesh(4, 2).groups(CommGroup.RDP_GROUP) == ((0, 2), (1, 3))
    assert ranks.run(on) == [of_stage_0, of_stage_1, of_stage_0, of_stage_1]
