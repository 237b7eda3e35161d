"""Gradients that a step leaves to an optimizer: who may have them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import tensorflow as tf

from smp_tf import horovod_scope
from smp_tf.batch.output import StepOutput, WeightedSum
from smp_tf.batch.output_description import GradientSum, OutputDescription
from smp_tf.config.config import Config
from smp_tf.errors import StepError
from smp_tf.gradients.average import average_gradients
from smp_tf.partition.spread import EVERYWHERE, Partial
from smp_tf.replicas import gradient_marks, sparse_sums
from smp_tf.replicas import unaveraged as unaveraged_gradients


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is one of two replicas, whose steps average nothing."""
    running = SimpleNamespace(
        config=Config(gradient_compression="1bit"), topology=SimpleNamespace(replicas=2, stages=1)
    )
    for name in ("current", "current_or_none"):
        monkeypatch.setattr(unaveraged_gradients.runtime, name, lambda: running)


def accumulated(*, is_averaged: bool = True) -> tf.Tensor:
    gradient = OutputDescription("g", gradient=GradientSum(EVERYWHERE if is_averaged else Partial("D")))
    return StepOutput(gradient, None, [1], WeightedSum(tf.constant([3.0, 6.0]), 3)).accumulate()


def test_what_a_step_leaves_is_marked_as_such() -> None:
    unaveraged, average = accumulated(is_averaged=False), accumulated()
    assert unaveraged.numpy().tolist() == average.numpy().tolist() == [1.0, 2.0]
    found = [gradient_marks.mark_of(one) for one in (unaveraged, average)]
    assert [mark.spread for mark in found] == [Partial("D"), EVERYWHERE]
    assert [(mark.is_unaveraged, mark.is_average) for mark in found] == [(True, False), (False, True)]
    with pytest.raises(StepError, match="and was given a gradient of a model that is split over them"):
        horovod_scope._refuse_what_is_split("allreduce", unaveraged)


@pytest.mark.parametrize("is_kept", [True, False])
def test_averages_of_them_are_refused(is_kept: bool, replicas: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of what was made of one in a graph."""
    if not is_kept:
        monkeypatch.undo()
    unaveraged = accumulated(is_averaged=False)
    wanted = r'With "gradient_compression": "1bit" the gradients of a step are not averaged: .* mine was given'
    for gradients in ([unaveraged], [None, unaveraged], "made of it"):

        def asked(given: object = gradients) -> None:
            if given == "made of it":
                tf.function(
                    lambda: unaveraged_gradients.require_averaged([2.0 * accumulated()], "mine")
                ).get_concrete_function()
            else:
                unaveraged_gradients.require_averaged(given, "mine")

        if is_kept:
            with pytest.raises(StepError, match=wanted):
                asked()
        else:
            asked()
    unaveraged_gradients.require_averaged(
        [None, tf.constant(1.0), gradient_marks.mark(tf.constant(1.0), spread=EVERYWHERE)], "mine"
    )


def test_average_gradients_is_such_an_average(replicas: None) -> None:
    with pytest.raises(StepError, match=r"smp\.average_gradients \(which smp\.DistributedOptimizer calls\) was given"):
        average_gradients([accumulated(is_averaged=False)])


def test_so_is_horovods(replicas: None) -> None:
    arguments = {"op": None, "average": None, "prescale_factor": 1.0, "postscale_factor": 1.0}
    with pytest.raises(StepError, match=r"hvd\.allreduce was given such a gradient"):
        horovod_scope._allreduce("allreduce", accumulated(is_averaged=False), arguments, pytest.fail)


def test_without_the_key_nothing_is_kept(init: Callable[..., None]) -> None:
    assert not unaveraged_gradients.are_left()
    init(gradient_compression="1bit")
    assert not unaveraged_gradients.are_left()


def test_sparse_gradients_of_a_replica_alone() -> None:
    parts = [tf.IndexedSlices(tf.constant([[1.0], [2.0]]), tf.constant([3, 1]), tf.constant([4, 1]))] * 2
    total = sparse_sums.own_weighted_sum(parts, [2, 1])
    assert total.values.numpy().ravel().tolist() == [2.0, 4.0, 1.0, 2.0]
    assert total.indices.numpy().tolist() == [3, 1, 3, 1]
