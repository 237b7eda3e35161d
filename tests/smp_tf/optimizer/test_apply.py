"""Which of four cases a call of `apply_gradients` is on this rank."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
import tf_keras

from smp_tf.optimizer.apply import Apply, Case

PLAIN = tf_keras.optimizers.SGD()
CLIPS = tf_keras.optimizers.SGD(global_clipnorm=1.0)
CLIPS_EACH = tf_keras.optimizers.SGD(clipnorm=1.0)
SCALES = tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.SGD(global_clipnorm=1.0))

IS_SPREAD, IS_EMPTY, IS_USERS = {"is_spread": True}, {"is_empty": True}, {"is_users": True}


def call_of(optimizer: Any, given: list[Any], **known: bool) -> Apply:
    """A call of which two weights are left here, of which one has no gradient; `given` is what the optimizer gets."""
    kept = [(tf.constant([1.0]), tf.Variable([1.0])), (None, tf.Variable([1.0]))]
    known = {"is_spread": False, "is_empty": False, "is_users": False, **known}
    return Apply(optimizer, kept, lambda pairs: given.append(len(pairs)), **known)


@pytest.mark.parametrize(
    ("optimizer", "known", "case"),
    [
        (PLAIN, {}, Case.ALONE),
        (PLAIN, IS_SPREAD, Case.ALONE),
        (PLAIN, IS_USERS, Case.ALONE),
        (PLAIN, IS_EMPTY, Case.NOTHING),
        (PLAIN, IS_EMPTY | IS_SPREAD, Case.NOTHING),
        (CLIPS, {}, Case.ALONE),
        (CLIPS, IS_SPREAD, Case.LOOKS_AT_ALL),
        (CLIPS, IS_SPREAD | IS_EMPTY, Case.NOTHING),
        (CLIPS_EACH, IS_SPREAD, Case.ALONE),
        # Nobody knows what a class of the script's own does with all gradients.
        (PLAIN, IS_SPREAD | IS_USERS, Case.LOOKS_AT_ALL),
        (PLAIN, IS_SPREAD | IS_USERS | IS_EMPTY, Case.NOTHING),
        (SCALES, {}, Case.SCALES),
        (SCALES, IS_SPREAD | IS_EMPTY, Case.SCALES),
    ],
)
def test_case(optimizer: Any, known: dict[str, bool], case: Case) -> None:
    assert call_of(optimizer, [], **known).case is case


def test_where_nothing_is_left_the_optimizer_only_counts() -> None:
    given: list[Any] = []
    optimizer = tf_keras.optimizers.SGD()
    call_of(optimizer, given, is_empty=True).run()
    assert (given, int(optimizer.iterations)) == ([], 1)


def test_a_class_of_the_script_gets_a_stand_in_where_nothing_is_left() -> None:
    given: list[Any] = []
    optimizer = tf_keras.optimizers.SGD()
    call_of(optimizer, given, is_empty=True, is_spread=True, is_users=True).run()
    # One pair, in place of the two: the class itself counts.
    assert (given, int(optimizer.iterations)) == ([1], 0)


def test_otherwise_it_gets_what_is_left() -> None:
    given: list[Any] = []
    for optimizer, known in ((PLAIN, {}), (CLIPS, IS_SPREAD), (PLAIN, IS_SPREAD | IS_USERS), (SCALES, {})):
        call_of(optimizer, given, **known).run()
    assert given == [2, 2, 2, 2]
