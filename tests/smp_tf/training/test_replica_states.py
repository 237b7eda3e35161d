"""A state is that of all replicas' samples, or of each replica's own, and never partly one and partly the other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tensorflow as tf

from smp_tf.errors import StepError
from smp_tf.training import replica_states
from smp_tf.training.replica_states import ReplicaStates


def state(value: float, aggregation: tf.VariableAggregation = tf.VariableAggregation.SUM) -> tf.Variable:
    return tf.Variable(value, name="seen", aggregation=aggregation)


def test_states_that_all_replicas_hold_are_known() -> None:
    states, one, other = ReplicaStates("train_step"), state(1.0), state(2.0)
    states.note([one], [other])
    assert states.held == {id(one)}


def test_a_state_that_is_written_in_two_ways_is_an_error() -> None:
    states, one = ReplicaStates("train_step of model 'net'"), state(1.0)
    states.note([one], [])
    with pytest.raises(StepError, match="'seen:0' holds once for the batches of all replicas, or for each microbatch"):
        states.note([], [one])


@pytest.mark.parametrize(("replica", "left"), [(0, [3.0, 5.0]), (1, [0.0, 5.0])])
def test_the_first_replica_keeps_what_all_have_seen(
    monkeypatch: pytest.MonkeyPatch, replica: int, left: list[float]
) -> None:
    here = {"P": 1, "D": replica, "T": 0}
    monkeypatch.setattr(replica_states, "layouts", SimpleNamespace(here=lambda: here))
    states, total, largest = ReplicaStates("train_step"), state(3.0), state(5.0, tf.VariableAggregation.NONE)
    states.note([total, largest], [])
    states.is_apart = True
    states.note([], [total, largest])
    assert [float(total), float(largest)] == left
    assert not states.held
