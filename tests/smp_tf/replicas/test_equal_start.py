"""What replicas begin with, where they do not have the same weights at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from smp_tf.errors import StepError
from smp_tf.job import runtime
from smp_tf.partition.layout import Layout
from smp_tf.replicas import equal_start
from smp_tf.variables.decision import Decision
from tests.smp_tf.rank_threads import Ranks


def test_replicas_with_different_numbers_of_weights_are_told_of_a_model_that_was_let_go() -> None:
    """Seen where Python had freed a model on one replica alone: an index was out of range."""
    topology: Any = SimpleNamespace(replica=0)
    with pytest.raises(StepError, match=r"different numbers of new weights: 2, 1, by replica.*call gc.collect\(\)"):
        equal_start._take([], [[1, 2], [1]], topology, speaks=True)


def test_where_a_stage_has_two_shards_its_ranks_take_it_for_their_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages, two replicas, two shards: an mp_rank, of which there are four, would be no stage."""
    ranks = Ranks(monkeypatch, 8, 2, shards=2)
    monkeypatch.setattr(runtime, "current", ranks.current)
    taken: dict[int, Any] = {}

    def take(stored: list[Any], said: list[Any], topology: Any, *, speaks: bool) -> None:
        taken[topology.rank] = [float(v.numpy()) for v in stored], len(said), speaks

    monkeypatch.setattr(equal_start, "_take", take)

    def on(rank: int) -> None:
        of_stage_1 = 3.0 if rank in (6, 7) else 2.0
        begun = [Decision(tf.Variable(v), Layout(stage, stage), Layout()) for stage, v in enumerate((1.0, of_stage_1))]
        equal_start.take_those_of_one(begun)

    assert ranks.run(on) == [None] * 8
    assert taken == {2: ([2.0], 2, True), 3: ([2.0], 2, True), 6: ([3.0], 2, True), 7: ([3.0], 2, True)}
