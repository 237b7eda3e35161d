"""What a model is called with is remembered as types for any number of samples, which all calls of one kind fit."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from smp_tf.variables.fed_types import FedTypes, types_of


def typed(*args: Any, cut: dict[int, int] | None = None, **kwargs: Any) -> Any:
    axes = [(tensor, axis) for tensor, axis in zip(args, [(cut or {}).get(n) for n in range(len(args))], strict=True)]
    return types_of(args, kwargs, lambda tensor: next((axis for known, axis in axes if known is tensor), None))


def known_after(*calls: Any) -> Any:
    fed = FedTypes()
    for call in calls:
        fed.note(call)
    return fed.known


def test_nothing_is_known_before_the_first_call() -> None:
    assert FedTypes().known is None


def test_samples_are_left_open_and_other_sizes_are_not() -> None:
    assert typed(tf.zeros([4, 3], tf.float64), True, mask=tf.ones([4, 3], tf.bool)) == (
        (tf.TensorSpec([None, 3], tf.float64), None),
        {"mask": tf.TensorSpec([None, 3], tf.bool)},
    )


def test_the_axis_along_which_the_step_cuts_a_tensor_is_left_open_too() -> None:
    assert typed(tf.zeros([5, 4, 3]), tf.zeros([4, 3]), cut={0: 1, 1: 0})[0] == (
        tf.TensorSpec([None, None, 3]),
        tf.TensorSpec([None, 3]),
    )


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (tf.constant(3.0), tf.TensorSpec([])),
        (tf.ragged.constant([[1], [2, 3]]), tf.RaggedTensorSpec([None, None], tf.int32, 1, tf.int64)),
        (tf.sparse.eye(4), tf.SparseTensorSpec([None, 4], tf.float32)),
        (tf.constant(["a", "b"]), tf.TensorSpec([None], tf.string)),
        (2.0, None),
        (tf.Variable(1.0), None),
    ],
)
def test_each_kind_of_argument_has_a_type_or_none(value: Any, wanted: Any) -> None:
    assert typed(value)[0] == (wanted,)


def test_structures_are_kept() -> None:
    assert typed({"a": tf.zeros([2]), "b": [tf.zeros([2, 1])]})[0] == (
        {"a": tf.TensorSpec([None]), "b": [tf.TensorSpec([None, 1])]},
    )


def test_calls_with_other_lengths_leave_the_length_open() -> None:
    known = known_after(typed({"x": tf.zeros([4, 10, 2])}), typed({"x": tf.zeros([2, 12, 2])}))
    assert known == (({"x": tf.TensorSpec([None, None, 2])},), {})


@pytest.mark.parametrize(
    "other",
    [typed(tf.zeros([4, 3], tf.float64)), typed((tf.zeros([4, 3]), tf.zeros([4]))), typed(3.0), typed()],
    ids=["another type", "another structure", "no tensor", "nothing"],
)
def test_a_call_of_another_kind_changes_nothing(other: Any) -> None:
    assert known_after(typed(tf.zeros([4, 3])), other) == ((tf.TensorSpec([None, 3]),), {})
