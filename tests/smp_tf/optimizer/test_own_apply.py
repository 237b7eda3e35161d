"""An optimizer's own code runs with the step where it joins gradients and then hands all of them on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tensorflow as tf

from smp_tf.optimizer import recorded_apply
from smp_tf.optimizer.own_apply import joins_gradients

Pairs = Sequence[tuple[Any, Any]]


def keras(pairs: Pairs) -> Any:
    """Stands for Keras's own method, which is recorded."""
    recorder = recorded_apply.recorder()
    assert recorder is not None
    return recorder.record(None, pairs, keras)


def by_their_norm(pairs: Pairs) -> Any:
    norm = tf.sqrt(tf.add_n([tf.reduce_sum(g**2) for g, _ in pairs if g is not None]))
    return keras([(None if g is None else g / norm, v) for g, v in pairs])


def one_by_one(pairs: Pairs) -> Any:
    return keras([(tf.clip_by_norm(g, 1.0), v) for g, v in pairs])


def goes_on(pairs: Pairs) -> Any:
    by_their_norm(pairs)
    return pairs[0][1].assign_add([1.0])


def in_two_calls(pairs: Pairs) -> Any:
    by_their_norm(pairs)
    return keras(pairs)


def hands_nothing_on(pairs: Pairs) -> Any:
    return pairs[0][1].assign_sub(tf.add_n([g for g, _ in pairs]))


def makes_a_variable(pairs: Pairs) -> Any:
    tf.Variable(1.0)
    return by_their_norm(pairs)


def fails(pairs: Pairs) -> Any:
    by_their_norm(pairs)
    raise ValueError("an error of the script's")


@pytest.mark.parametrize(
    ("apply", "joins"),
    [
        (by_their_norm, True),
        (one_by_one, False),
        (goes_on, False),
        (in_two_calls, False),
        (hands_nothing_on, False),
        (makes_a_variable, False),
        (fails, False),
    ],
)
def test_what_joins_gradients_is_found(apply: Callable[[Pairs], Any], joins: bool) -> None:
    variables = [tf.Variable([1.0]), tf.Variable([2.0])]
    found = []

    @tf.function
    def step() -> None:
        pairs = [(tf.identity(variable), variable) for variable in variables]
        found.append(joins_gradients(pairs, apply))

    step()
    assert found == [joins]
    assert [variable.numpy().tolist() for variable in variables] == [[1.0], [2.0]]


def test_a_sparse_gradient_is_left_to_the_rank_that_has_it() -> None:
    variable = tf.Variable([1.0])
    assert not joins_gradients([(tf.IndexedSlices([1.0], [0]), variable)], by_their_norm)


def test_a_gradient_that_is_none_is_none_there_too() -> None:
    variables = [tf.Variable([1.0]), tf.Variable([2.0]), tf.Variable([3.0])]
    found = []

    @tf.function
    def step() -> None:
        pairs = [(tf.identity(variables[0]), variables[0]), (None, variables[1]), (variables[2] * 2.0, variables[2])]
        found.append(joins_gradients(pairs, by_their_norm))

    step()
    assert found == [True]
