"""A call's arguments sorted into tensors and the rest, and which calls share a program."""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from smp_tf.errors import StepError
from smp_tf.step_arguments import Arguments, Slot, fill, sort_arguments

Pair = namedtuple("Pair", "left right")


def sorted_call(
    function: Callable[..., Any], *args: Any, signature: Sequence[Any] | None = None, **kwargs: Any
) -> Arguments:
    return sort_arguments(inspect.signature(function).bind(*args, **kwargs), signature)


def one(value: Any, **kwargs: Any) -> Arguments:
    return sorted_call(lambda x: None, value, **kwargs)


X = tf.constant([1.0, 2.0])


class TestSorting:
    def test_tensors_become_slots_and_the_rest_stays(self) -> None:
        found = sorted_call(lambda x, y, training=False: None, X, y=tf.constant(1), training=True)
        assert found.structure == {"x": Slot(0), "y": Slot(1), "training": True}
        assert found.tensors[0] is X
        assert (found.names, found.roots) == (("x", "y"), ("x", "y"))

    def test_arrays_and_scalars_of_numpy_are_tensors(self) -> None:
        found = one([np.array([1, 2], np.int16), np.float64(0.5)])
        assert [(t.dtype, t.numpy().tolist()) for t in found.tensors] == [(tf.int16, [1, 2]), (tf.float64, 0.5)]
        assert all(isinstance(t, tf.Tensor) for t in found.tensors)

    def test_numbers_text_and_none_of_python_are_not(self) -> None:
        found = one([1, 0.5, True, "text", b"bytes", None])
        assert found.structure == {"x": [1, 0.5, True, "text", b"bytes", None]}
        assert found.tensors == ()

    def test_structures_are_searched_and_each_tensor_is_named_with_its_place(self) -> None:
        value = {"a": [X, 3], "b": (Pair(X, None), {1: X})}
        found = one(value)
        assert found.structure == {"x": {"a": [Slot(0), 3], "b": (Pair(Slot(1), None), {1: Slot(2)})}}
        assert found.names == ("x['a'][0]", "x['b'][0].left", "x['b'][1][1]")
        assert found.roots == ("x", "x", "x")

    @pytest.mark.parametrize(
        "value",
        [
            [X],
            (X,),
            {"k": X},
            OrderedDict(b=X, a=1),
            defaultdict(list, {"k": X}),
            Pair(X, [X]),
            [{"k": (X, None)}, []],
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_filled_again_it_is_what_was_passed_of_the_same_types(self, value: Any) -> None:
        found = one(value)
        again = fill(found.structure["x"], found.tensors)
        assert type(again) is type(value)
        tf.nest.assert_same_structure(again, value)
        assert all(a is b for a, b in zip(tf.nest.flatten(again), tf.nest.flatten(value), strict=True))

    def test_composite_tensors_are_one_tensor_each(self) -> None:
        ragged, sparse = tf.ragged.constant([[1], []]), tf.sparse.from_dense([[1, 0]])
        found = one([ragged, sparse])
        assert found.tensors[0] is ragged
        assert found.tensors[1] is sparse

    def test_a_variable_is_passed_as_it_is(self) -> None:
        variable = tf.Variable(1.0)
        found = one(variable)
        assert found.structure["x"] is variable
        assert found.tensors == ()

    def test_more_positional_and_keyword_arguments(self) -> None:
        found = sorted_call(lambda *args, **kwargs: None, X, 2, y=X, z="text")
        assert found.structure == {"args": (Slot(0), 2), "kwargs": {"y": Slot(1), "z": "text"}}
        assert found.names == ("args[0]", "kwargs['y']")
        assert found.roots == ("args", "kwargs")


class TestSignature:
    INT, HALF = tf.TensorSpec([None], tf.int32), tf.TensorSpec([None], tf.float16)

    def test_arguments_are_cast_to_it(self) -> None:
        found = one([1.0, 2.0], signature=[self.INT])
        assert found.structure == {"x": Slot(0)}
        assert (found.tensors[0].dtype, found.tensors[0].numpy().tolist()) == (tf.int32, [1, 2])

    def test_arguments_beyond_it_stay_as_they_are(self) -> None:
        found = sorted_call(lambda x, y, z: None, X, X, 3, signature=[self.INT])
        assert [t.dtype for t in found.tensors] == [tf.int32, tf.float32]

    def test_none_stays_none(self) -> None:
        assert one(None, signature=[self.INT]).structure == {"x": None}

    def test_a_parameter_that_is_left_out_does_not_shift_the_others(self) -> None:
        found = sorted_call(lambda x, skipped=None, y=None: None, X, y=X, signature=[self.INT, self.INT, self.HALF])
        assert [t.dtype for t in found.tensors] == [tf.int32, tf.float16]

    def test_keywords_in_another_order(self) -> None:
        found = sorted_call(lambda x, y: None, y=X, x=X, signature=[self.INT, self.HALF])
        assert [(name, t.dtype) for name, t in zip(found.names, found.tensors, strict=True)] == [
            ("x", tf.int32),
            ("y", tf.float16),
        ]

    def test_more_positional_arguments_one_by_one(self) -> None:
        found = sorted_call(lambda x, *rest: None, X, X, X, X, signature=[self.INT, self.HALF, self.INT])
        assert [t.dtype for t in found.tensors] == [tf.int32, tf.float16, tf.int32, tf.float32]
        assert found.names == ("x", "rest[0]", "rest[1]", "rest[2]")

    def test_structures_of_types(self) -> None:
        found = one({"a": [1.0], "b": (2.0, "text")}, signature=[{"a": [self.INT], "b": (self.HALF, None)}])
        # A number of Python is a tensor where the signature says so.
        assert found.structure == {"x": {"a": [Slot(0)], "b": (Slot(1), "text")}}
        assert [t.dtype for t in found.tensors] == [tf.int32, tf.float16]

    def test_another_structure_is_an_error(self) -> None:
        with pytest.raises(
            StepError, match=r"'x' does not have the structure that input_signature gives it\. Received"
        ):
            one({"a": X}, signature=[{"a": self.INT, "b": self.INT}])


@dataclass
class Settings:
    rate: float


class SameName:
    def __repr__(self) -> str:
        return "the same for all"


class TestKey:
    @pytest.mark.parametrize(
        ("first", "second"),
        [
            (tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0])),
            (np.array([1.0, 2.0], np.float32), tf.constant([3.0, 4.0])),
            ({"k": [1, X]}, {"k": [1, X + 1.0]}),
            (0.5, 0.5),
            ("text", "text"),
            (Settings(0.5), Settings(0.5)),
            ({1, 2}, {2, 1}),
            (tf.ragged.constant([[1], [2, 3]]), tf.ragged.constant([[4, 5], [6]])),
            (None, None),
        ],
        ids=repr,
    )
    def test_calls_alike_share_a_program(self, first: Any, second: Any) -> None:
        assert one(first).key == one(second).key
        assert hash(one(first).key) == hash(one(second).key)

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            (tf.zeros([2]), tf.zeros([3])),
            (tf.zeros([2]), tf.zeros([2, 1])),
            (tf.zeros([2]), tf.zeros([2], tf.float64)),
            (X, [X]),
            ([X], (X,)),
            ({"a": X}, {"b": X}),
            ([X, 1], [X, 2]),
            (1, True),
            (1, 1.0),
            ("1", 1),
            (None, False),
            (0.1 + 0.2, 0.3),
            (X, X.numpy().tolist()),
            (Settings(0.5), Settings(0.25)),
            (SameName(), SameName()),
            (tf.ragged.constant([[1], [2, 3]]), tf.constant([1, 2])),
        ],
        ids=repr,
    )
    def test_other_calls_get_another(self, first: Any, second: Any) -> None:
        assert one(first).key != one(second).key

    def test_which_tensor_is_the_same_object_makes_no_difference(self) -> None:
        assert one([X, X]).key == one([X, X + 1.0]).key

    def test_names_of_tensors_in_a_graph_make_no_difference(self) -> None:
        keys = [one(X).key]

        @tf.function
        def traced(first: tf.Tensor, second: tf.Tensor) -> None:
            keys.extend([one(first).key, one(second).key])

        traced(X, X)
        assert keys[0] == keys[1] == keys[2]

    def test_a_variable_counts_by_what_it_is_not_by_its_value(self) -> None:
        variable, other = tf.Variable(1.0), tf.Variable(1.0)
        before = one(variable).key
        variable.assign(2.0)
        assert one(variable).key == before
        assert one(other).key != before

    def test_the_same_object_is_the_same(self) -> None:
        value = SameName()
        assert one(value).key == one(value).key
