"""An optimizer's own code that makes something of several gradients is told: a rank has those of its stage alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
import tf_keras

from smp_tf.errors import StepError
from smp_tf.gradients import joined_gradients

OPTIMIZER = tf_keras.optimizers.SGD()


def traced(make: Callable[[list[Any]], Any]) -> None:
    """Lets a function make something of two gradients, as an `apply_gradients` of the script's own does."""
    variables = [tf.Variable([1.0, 2.0], name=name) for name in ("first", "second")]

    @tf.function
    def step() -> None:
        gradients = [tf.identity(variable) for variable in variables]
        with joined_gradients.watching(OPTIMIZER, list(zip(gradients, variables, strict=True))):
            make(gradients)

    step()


def scaled_by_their_norm(gradients: list[Any]) -> list[Any]:
    norm = tf.sqrt(tf.add_n([tf.reduce_sum(g**2) for g in gradients]))
    return [g / norm for g in gradients]


def joined(gradients: list[Any]) -> Any:
    return tf.concat(gradients, 0)


def scaled_by_the_other(gradients: list[Any]) -> Any:
    return gradients[0] * tf.reduce_max(gradients[1])


def after_sparse(gradients: list[Any]) -> Any:
    return tf.reduce_sum(gradients[0]) + tf.reduce_sum(tf.reshape(gradients[1], [2, 1]))


@pytest.mark.parametrize("make", [scaled_by_their_norm, joined, scaled_by_the_other, after_sparse])
def test_what_joins_gradients_is_told_with_its_op_and_the_weights(init: Callable[..., None], make: Any) -> None:
    init()
    with pytest.raises(StepError, match=r"has for SGD .* Its op '\S+' \(\w+\) takes those of 'first:0' and 'second:0'"):
        traced(make)


def each_by_itself(gradients: list[Any]) -> Any:
    return [tf.clip_by_norm(g, 1.0) - tf.reduce_mean(g) for g in gradients]


def by_a_norm_of_all(gradients: list[Any]) -> Any:
    with joined_gradients.allowed():
        norm = tf.add_n([tf.nn.l2_loss(g) for g in gradients])
    return [g * norm for g in gradients]


def handed_on(gradients: list[Any]) -> Any:
    joined_gradients.handed_on()
    return tf.group(tf.add_n(gradients))


@pytest.mark.parametrize("make", [each_by_itself, by_a_norm_of_all, handed_on])
def test_what_one_process_would_compute_too_goes_through(init: Callable[..., None], make: Any) -> None:
    init()
    traced(make)


def test_who_wants_it_so_says_so(init: Callable[..., None]) -> None:
    init(check_losses=False)
    traced(joined)
