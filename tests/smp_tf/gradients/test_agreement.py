"""Replicas that receive other averages than each other average what all of them have, and say so before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from smp_tf.errors import StepError
from smp_tf.gradients import agreement
from smp_tf.gradients.agreement import NOTHING, OF_A_STEP, SOMETHING, ZEROS
from smp_tf.gradients.average import average_gradients
from smp_tf.replicas import gradient_marks
from smp_tf.sharding import layouts, receivers

#: Of three replicas, the first updates a weight of the shape of what is in place 0.
OWNERS = np.array([[True, False, False], [False, False, False]])


def problem(*lists: list[int]) -> str:
    return agreement._problem(np.array([n for said in lists for n in (len(said), *said)]), OWNERS)


@pytest.mark.parametrize(
    "lists",
    [
        [[SOMETHING, SOMETHING]] * 3,
        [[OF_A_STEP, NOTHING], [NOTHING, OF_A_STEP], [NOTHING, NOTHING]],
        [[OF_A_STEP, SOMETHING], [NOTHING, SOMETHING], [NOTHING, SOMETHING]],
        # Two replicas have something of their own, or none.
        [[SOMETHING, NOTHING], [SOMETHING, NOTHING], [ZEROS, NOTHING]],
        [[ZEROS, NOTHING]] * 3,
        # It is another replica that has something than the one that updates such a weight.
        [[ZEROS, NOTHING], [SOMETHING, NOTHING], [ZEROS, NOTHING]],
    ],
    ids=["own", "of a step", "both", "two have something", "none has", "not its owner"],
)
def test_what_all_have_or_a_step_has_averaged_is_alike(lists: list[list[int]]) -> None:
    assert problem(*lists) == ""


def test_what_only_one_replica_has_is_named() -> None:
    """It once waited for the others."""
    assert problem([NOTHING, SOMETHING], [NOTHING, NOTHING], [NOTHING, OF_A_STEP]).startswith(
        "With shard_optimizer_state smp.average_gradients was given lists with unlike things in place 1: replica 0 has "
        "what is not known to come from a step; replica 1 has nothing; replica 2 has what comes of a step. There a "
        "replica has the averages of the gradients of weights that it updates, and None for the others."
    )


def test_accumulators_filled_with_zeros_are_refused() -> None:
    """They were divided by the number of replicas once more."""
    assert problem([SOMETHING, SOMETHING], [ZEROS, SOMETHING], [ZEROS, SOMETHING]).startswith(
        "With shard_optimizer_state smp.average_gradients was given zeros in place 0 on all replicas but replica 0, "
        "which updates a weight of that shape: a step's averages, it seems, with zeros for those of other replicas, "
        "and their average would be too small by a factor of 3."
    )


def test_lists_of_different_lengths_are_refused() -> None:
    said = "was given lists of different lengths, of 2 on this replica"
    assert said in problem([SOMETHING, SOMETHING], [SOMETHING, SOMETHING], [SOMETHING])
    assert said in problem([SOMETHING], [SOMETHING, SOMETHING], [SOMETHING, SOMETHING, SOMETHING])


class TestAverages:
    """Of replica 0 of three, whose lists all are as its own."""

    @pytest.fixture(autouse=True)
    def apart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(layouts, "are_received_apart", lambda: True)
        monkeypatch.setattr(receivers, "owners_of_shape", lambda tensor: {0} if tensor.shape == [2] else set())

    def test_those_of_the_scripts_own_variables_are_averaged(self, reduced: list[dict[str, Any]]) -> None:
        (average,) = average_gradients([tf.constant([1.0])])
        assert average.numpy().tolist() == [1.0]
        assert [asked["name"] for asked in reduced] == ["smp_average_alike_sums", "smp_average_float32"]

    def test_what_was_made_of_averages_in_a_function_is_one(self, reduced: list[dict[str, Any]]) -> None:
        @tf.function
        def clipped(gradient: tf.Tensor) -> Any:
            return average_gradients([tf.clip_by_norm(gradient_marks.mark(gradient * 1.0, is_of_step=True), 1.0), None])

        value, none = clipped(tf.constant([3.0, 4.0]))
        assert (value.numpy().tolist(), none) == (pytest.approx([0.6, 0.8]), None)
        # Another replica may have something in its place, and all must hear of it.
        assert [asked["name"] for asked in reduced] == ["smp_average_alike_sums"]

    def test_what_the_replicas_say_is_looked_at(
        self, reduced: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In a function, too, where nothing is averaged before."""
        import horovod.tensorflow as hvd

        others = [2, NOTHING, SOMETHING]
        monkeypatch.setattr(hvd, "allgather", lambda own, **kwargs: tf.concat([own, others, own], 0))
        given = [gradient_marks.mark(tf.constant([1.0]), is_of_step=True), tf.constant([1.0])]
        assert [float(average[0]) for average in average_gradients(given)] == [1.0, 1.0]
        others[2] = NOTHING
        with pytest.raises(StepError, match=r"in place 1: .*; replica 1 has nothing; replica 2 has what is not known"):
            average_gradients(given)
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"in place 1: .*; replica 1 has nothing"):
            tf.function(lambda x: average_gradients([None, x])[1])(tf.constant([1.0]))

    @pytest.mark.parametrize(("value", "state"), [([0.0, 0.0], ZEROS), ([0.0, 1.0], SOMETHING), ([0.0], SOMETHING)])
    def test_zeros_of_the_shape_of_a_weight_are_told(
        self, reduced: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, value: list[float], state: int
    ) -> None:
        import horovod.tensorflow as hvd

        sent = []
        monkeypatch.setattr(hvd, "allgather", lambda own, **kwargs: sent.append(own.numpy()) or tf.tile(own, [3]))
        average_gradients([tf.constant(value)])
        assert [said.tolist() for said in sent] == [[1, state]]
