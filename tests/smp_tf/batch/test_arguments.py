"""A call's arguments sorted into tensors and the rest, and which calls share a program."""

from __future__ import annotations

import inspect
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from smp_tf.batch.arguments import Arguments, sort_arguments
from smp_tf.batch.structure import Slot, fill
from smp_tf.errors import StepError

Pair = namedtuple("Pair", "left right")


class Outputs(OrderedDict):
    """As libraries of models return it: `outputs["loss"]`, and `outputs.loss` as well."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


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

    def test_a_mapping_whose_items_are_its_attributes_too_keeps_its_class(self) -> None:
        found = one(Outputs(loss=X, rest=[X]))
        assert (found.names, found.structure) == (
            ("x['loss']", "x['rest'][0]"),
            {"x": {"loss": Slot(0), "rest": [Slot(1)]}},
        )
        filled = fill(found.structure["x"], [10, 11])
        assert (type(filled), filled.loss, filled.rest) == (Outputs, 10, [11])

    def test_a_mapping_with_a_tensor_that_is_no_item_is_refused(self) -> None:
        outputs = Outputs(loss=X)
        object.__setattr__(outputs, "hidden", tf.constant(1.0))
        with pytest.raises(StepError, match="argument 'x' is a Outputs that holds tensors"):
            one(outputs)

    def test_a_mapping_around_a_dictionary_keeps_its_class(self) -> None:
        found = one(UserDict({"ids": X, "length": 2}))
        filled = fill(found.structure["x"], [10])
        assert (type(filled), dict(filled)) == (UserDict, {"ids": 10, "length": 2})

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
        number, half = tf.TensorSpec([], tf.int32), tf.TensorSpec(None, tf.float16)
        found = one({"a": [1.0], "b": (2.0, "text")}, signature=[{"a": [number], "b": (half, None)}])
        # A number of Python is a tensor where the signature says so.
        assert found.structure == {"x": {"a": [Slot(0)], "b": (Slot(1), "text")}}
        assert [t.dtype for t in found.tensors] == [tf.int32, tf.float16]

    def test_another_structure_is_an_error(self) -> None:
        with pytest.raises(
            StepError, match=r"'x' does not have the structure that input_signature gives it\. Received"
        ):
            one({"a": X}, signature=[{"a": self.INT, "b": self.INT}])

    def test_another_shape_is_an_error(self) -> None:
        with pytest.raises(
            StepError, match=r"'x' does not fit its type in input_signature, TensorSpec\(shape=\(None,\)"
        ):
            one(tf.zeros([2, 2]), signature=[self.INT])

    def test_what_it_leaves_open_stays_open(self) -> None:
        found = one(X, signature=[self.HALF])
        assert found.specs == (self.HALF,)
        assert one(tf.zeros([5]), signature=[self.HALF]).key == found.key
        assert found.with_own_types().specs == (tf.TensorSpec([2], tf.float16),)

    def test_composite_types(self) -> None:
        ragged = tf.RaggedTensorSpec([None, None], tf.int32)
        assert one(tf.ragged.constant([[1], [2, 3]]), signature=[ragged]).specs == (ragged,)
        with pytest.raises(StepError, match="'x' does not fit its type"):
            one(tf.ragged.constant([[1.0]]), signature=[ragged])

    def test_records_of_types(self) -> None:
        found = one(Batch([1.0, 2.0], "a"), signature=[Batch(self.INT, "a")])
        assert [t.dtype for t in found.tensors] == [tf.int32]


@dataclass(frozen=True, slots=True)
class Batch:
    """A record of a script's own."""

    x: Any
    name: str = "batch"


class Windows:
    """An object that cuts itself."""

    def __init__(self, x: Any, width: int) -> None:
        self.x, self.width = x, width

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> Windows:
        return Windows(self.x[mb * self.width : (mb + 1) * self.width], self.width)


class Holder:
    def __init__(self, x: Any) -> None:
        self.x = x


class TestRecordsAndObjects:
    def test_a_dataclass_is_a_structure(self) -> None:
        found = one([Batch(X, "train")])
        assert found.tensors == (X,)
        assert found.names == ("x[0].x",)
        again = fill(found.structure["x"], found.tensors)[0]
        assert type(again) is Batch
        assert (again.x is X, again.name) == (True, "train")

    def test_a_dataclass_without_tensors_is_passed_as_it_is(self) -> None:
        settings = Settings(0.5)
        assert one(settings).structure["x"] is settings

    def test_an_object_that_cuts_itself_is_taken_apart(self) -> None:
        found = one(Windows(np.array([1.0, 2.0]), 1))
        (taken,) = found.tensors
        assert found.names == ("x",)
        assert [t.numpy().tolist() for t in taken.tensors] == [[1.0, 2.0]]
        again = taken.value()
        assert (type(again), again.width) == (Windows, 1)

    def test_such_objects_share_a_program_where_all_but_the_tensors_values_is_equal(self) -> None:
        assert one(Windows(X, 1)).key == one(Windows(X + 1.0, 1)).key
        assert one(Windows(X, 1)).key != one(Windows(X, 2)).key
        assert one(Windows(X, 1)).key != one(Windows(tf.zeros([3]), 1)).key
        assert one(Batch(X, "a")).key != one(Batch(X, "b")).key

    def test_an_object_that_hides_tensors_is_told_what_to_do(self) -> None:
        with pytest.raises(StepError, match=r"'x' is a Holder that holds tensors, .* smp_slice\(num_mb, mb, axis\)"):
            one(Holder(X))

    def test_a_set_of_anything_else_is_passed_as_it_is(self) -> None:
        assert one({1, 2}).structure["x"] == {1, 2}


INTS = tf.constant([3, 4])
SPARSE = tf.sparse.from_dense([[1.0, 0.0], [0.0, 2.0]])


class TestSets:
    """What TensorFlow lets a script put into a set is cut like anything else, in an order that all ranks have."""

    def test_references_are_ordered_by_the_types_of_their_tensors(self) -> None:
        for value in ({X.ref(), INTS.ref(), "text"}, {"text", INTS.ref(), X.ref()}):
            found = one(value)
            assert [t is e for t, e in zip(found.tensors, (X, INTS), strict=True)] == [True, True]
            assert found.names == ("x[1].deref()", "x[2].deref()")
            assert found.roots == ("x", "x")

    @pytest.mark.parametrize("kind", [set, frozenset])
    def test_filled_again_it_is_such_a_set_gone_through_in_that_order(self, kind: type) -> None:
        found = one(kind([INTS.ref(), X.ref(), SPARSE]))
        other = [tensor + tensor if isinstance(tensor, tf.Tensor) else SPARSE for tensor in found.tensors]
        again = fill(found.structure["x"], other)
        assert isinstance(again, kind)
        items = [item if item is SPARSE else item.deref() for item in again]
        assert [item is e for item, e in zip(items, other, strict=True)] == [True] * 3
        assert again == kind(again)

    def test_what_is_added_to_it_comes_last_and_what_is_taken_away_is_gone(self) -> None:
        found = one({X.ref(), INTS.ref()})
        again = fill(found.structure["x"], found.tensors)
        again.add("more")
        again.discard(X.ref())
        assert [item if isinstance(item, str) else item.deref() is INTS for item in again] == [True, "more"]

    def test_sparse_tensors_objects_and_tuples_in_it(self) -> None:
        windows = Windows(tf.zeros([2, 2]), 1)
        found = one({SPARSE, windows, (1, X.ref()), frozenset({INTS.ref()})})
        assert len(found.tensors) == 4
        again = fill(
            found.structure["x"], [windows if t is not SPARSE and hasattr(t, "template") else t for t in found.tensors]
        )
        assert SPARSE in again
        assert windows in again
        assert (1, X.ref()) in again
        assert frozenset({INTS.ref()}) in again

    def test_tensors_of_one_type_cannot_be_told_apart(self) -> None:
        with pytest.raises(
            StepError, match=r"'x' is a set in which two items are tensors of one type, .*float32.*A set has no order"
        ):
            one({X.ref(), (X + 1.0).ref()})

    def test_numbers_of_numpy_are_told_to_be_numbers_of_python(self) -> None:
        with pytest.raises(
            StepError, match=r"'x' is a set with the number .*1\.0.* of NumPy, .*Pass numbers of Python"
        ):
            one({np.float32(1.0)})

    def test_a_reference_outside_a_set(self) -> None:
        found = one([X.ref()])
        assert found.tensors[0] is X
        assert fill(found.structure["x"], [INTS])[0].deref() is INTS

    def test_references_of_variables_are_passed_as_they_are(self) -> None:
        value = {tf.Variable(1.0).ref(), 3}
        assert one(value).structure["x"] is value

    def test_calls_alike_share_a_program(self) -> None:
        assert one({X.ref(), INTS.ref()}).key == one({(INTS + 1).ref(), (X + 1.0).ref()}).key
        assert one({X.ref(), INTS.ref()}).key != one({X.ref()}).key
        assert one({X.ref()}).key != one(frozenset({X.ref()})).key


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
