"""How a batch is cut: sizes, axes, kinds of tensors, and in which words bad arguments are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from smp_tf.batch.microbatches import (
    Slicer,
    SplitArgument,
    microbatch_spec,
    plan_arguments,
    sizes_of,
    static_batch_size,
)
from smp_tf.errors import StepError


def types(tensors: Sequence[Any]) -> list[tf.TypeSpec]:
    return [tf.type_spec_from_value(tf.convert_to_tensor(t) if isinstance(t, np.ndarray) else t) for t in tensors]


def plan(*tensors: Any, non_split: Sequence[str] = (), axes: dict[str, int] | None = None) -> tuple[SplitArgument, ...]:
    """The plan for arguments named a, b, c, ..."""
    names = "abcdefg"[: len(tensors)]
    return plan_arguments(list(names), list(names), types(tensors), frozenset(non_split), axes or {})


def spec(*shape: int | None, dtype: tf.DType = tf.float32) -> tf.TensorSpec:
    return tf.TensorSpec(shape, dtype)


def open_argument(*shape: int | None, axis: int | None = 0, name: str = "a") -> SplitArgument:
    return SplitArgument(name, axis, spec(*shape))


class TestSizes:
    @pytest.mark.parametrize(
        ("batch", "microbatches", "sizes"),
        [
            (8, 4, (2, 2, 2, 2)),
            (10, 4, (3, 3, 2, 2)),
            (5, 4, (2, 1, 1, 1)),
            (4, 4, (1, 1, 1, 1)),
            (7, 1, (7,)),
            (11, 3, (4, 4, 3)),
        ],
    )
    def test_the_larger_ones_come_first(self, batch: int, microbatches: int, sizes: tuple[int, ...]) -> None:
        assert sizes_of(batch, microbatches) == sizes

    @given(st.integers(1, 200), st.integers(1, 200))
    def test_they_differ_by_at_most_one_and_make_the_batch(self, batch: int, microbatches: int) -> None:
        sizes = sizes_of(batch, min(batch, microbatches))
        assert sum(sizes) == batch
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 1
        assert list(sizes) == sorted(sizes, reverse=True)


class TestPlan:
    def test_axis_0_unless_told_otherwise(self) -> None:
        planned = plan(tf.zeros([4, 3]), tf.zeros([3, 4], tf.int64), axes={"b": 1})
        assert planned == (
            SplitArgument("a", 0, tf.TensorSpec([4, 3], tf.float32)),
            SplitArgument("b", 1, tf.TensorSpec([3, 4], tf.int64)),
        )

    def test_a_negative_axis_counts_from_the_end(self) -> None:
        assert plan(tf.zeros([2, 3, 4]), axes={"a": -1})[0].axis == 2
        assert plan(tf.zeros([2, 3, 4]), axes={"a": -3})[0].axis == 0

    def test_what_is_passed_whole_may_be_of_any_kind(self) -> None:
        planned = plan(tf.constant(1.0), tf.ragged.constant([[1.0], []]), non_split="ab", axes={"b": 1})
        assert [argument.axis for argument in planned] == [None, None]

    def test_all_tensors_of_a_structure_are_cut_as_its_parameter_says(self) -> None:
        tensors = [tf.zeros([2, 6]), tf.zeros([3, 6])]
        planned = plan_arguments(["pair[0]", "pair[1]"], ["pair", "pair"], types(tensors), frozenset(), {"pair": 1})
        assert [(argument.name, argument.axis) for argument in planned] == [("pair[0]", 1), ("pair[1]", 1)]

    def test_names_of_tensors_are_no_part_of_their_type(self) -> None:
        @tf.function
        def traced(x: tf.Tensor) -> None:
            specs.append(plan(x)[0].spec)

        specs: list[tf.TensorSpec] = []
        traced(tf.zeros([2, 2]))
        assert specs == [tf.TensorSpec([2, 2], tf.float32)]
        assert specs[0].name is None


class TestRefused:
    def test_a_scalar(self) -> None:
        with pytest.raises(StepError) as raised:
            plan(tf.zeros([2]), tf.constant(1.0))
        assert str(raised.value) == (
            "Step argument 'b' is a scalar and cannot be cut into microbatches. Name it in "
            "@smp.step(non_split_inputs=['b']) to pass it whole to every microbatch."
        )

    @pytest.mark.parametrize("axis", [2, -3])
    def test_an_axis_that_is_not_there(self, axis: int) -> None:
        with pytest.raises(StepError) as raised:
            plan(tf.zeros([2, 3]), axes={"a": axis})
        assert str(raised.value) == (
            f"Step argument 'a' has 2 axes, so it cannot be cut along axis {axis}. "
            f"Change input_split_axes={{'a': {axis}}}."
        )

    def test_a_ragged_tensor_along_another_axis(self) -> None:
        with pytest.raises(StepError, match=r"'a' is a ragged tensor, which can only be cut along axis 0\. Change"):
            plan(tf.ragged.constant([[1.0], [2.0, 3.0]]), axes={"a": 1})

    def test_a_kind_of_tensor_that_cannot_be_cut(self) -> None:
        slices = tf.IndexedSlices(tf.zeros([2, 3]), tf.constant([0, 1]), tf.constant([4, 3]))
        with pytest.raises(StepError) as raised:
            plan(slices)
        assert str(raised.value) == (
            "Step argument 'a' is of type IndexedSlices, which cannot be cut into microbatches. Tensors, ragged and "
            "sparse tensors can. Pass it whole with @smp.step(non_split_inputs=['a'])."
        )

    def test_the_root_is_named_where_it_is_to_be_changed(self) -> None:
        with pytest.raises(StepError, match=r"batch\['x'\]\" is a scalar .*non_split_inputs=\['batch'\]"):
            plan_arguments(["batch['x']"], ["batch"], types([tf.constant(1)]), frozenset(), {})

    def test_arguments_of_different_batch_size(self) -> None:
        with pytest.raises(StepError) as raised:
            static_batch_size(plan(tf.zeros([4]), tf.zeros([3, 4]), tf.zeros([2, 5]), axes={"c": 1}))
        assert str(raised.value) == (
            "All arguments of a step that are cut into microbatches need the same number of samples: 'a' has 4, "
            "'b' has 3, 'c' has 5. Arguments that are not batches belong in non_split_inputs."
        )


class TestBatchSize:
    def test_that_of_the_arguments_that_are_cut(self) -> None:
        planned = plan(tf.zeros([6, 2]), tf.zeros([2, 6]), tf.zeros([9]), non_split="c", axes={"b": 1})
        assert static_batch_size(planned) == 6

    def test_one_where_nothing_is_cut(self) -> None:
        assert static_batch_size(plan(tf.zeros([9]), non_split="a")) == 1
        assert static_batch_size(()) == 1

    def test_unknown_where_any_shape_leaves_it_open(self) -> None:
        assert static_batch_size([open_argument(None, 2)]) is None
        assert static_batch_size([open_argument(6, 2), open_argument(None, 2, name="b")]) is None
        assert static_batch_size([SplitArgument("a", 0, tf.TensorSpec(None, tf.float32))]) is None

    def test_of_ragged_and_sparse_tensors(self) -> None:
        assert static_batch_size(plan(tf.ragged.constant([[1.0], [2.0, 3.0], []]))) == 3
        assert static_batch_size(plan(tf.sparse.from_dense([[1.0, 0.0], [0.0, 2.0]]))) == 2


class TestMicrobatchSpec:
    def test_the_cut_axis_has_the_size_of_a_microbatch(self) -> None:
        assert microbatch_spec(open_argument(6, 4), 2) == spec(2, 4)
        assert microbatch_spec(open_argument(6, 4, axis=1), 2) == spec(6, 2)
        assert microbatch_spec(open_argument(6, 4), None) == spec(None, 4)

    def test_what_is_passed_whole_keeps_its_type(self) -> None:
        assert microbatch_spec(open_argument(6, 4, axis=None), 2) == spec(6, 4)
        unknown = SplitArgument("a", 0, tf.TensorSpec(None, tf.float32))
        assert microbatch_spec(unknown, 2) == tf.TensorSpec(None, tf.float32)

    def test_of_ragged_and_sparse_tensors(self) -> None:
        (ragged,) = plan(tf.ragged.constant([[1.0], [2.0, 3.0], []]))
        assert microbatch_spec(ragged, 1) == tf.RaggedTensorSpec([1, None], tf.float32, 1, tf.int64)
        (sparse,) = plan(tf.sparse.from_dense([[1.0, 0.0], [0.0, 2.0]]))
        assert microbatch_spec(sparse, None) == tf.SparseTensorSpec([None, 2], tf.float32)


def cut(planned: Sequence[SplitArgument], values: Sequence[Any], microbatches: int) -> list[list[Any]]:
    """For each microbatch the arguments' parts, flat."""
    slicer = Slicer(planned, values, microbatches)
    parts = len(tf.nest.flatten(list(values), expand_composites=True))
    return [[slicer(part, microbatch).numpy().tolist() for part in range(parts)] for microbatch in range(microbatches)]


def composite_parts(value: Any, microbatches: int, axes: dict[str, int] | None = None) -> list[Any]:
    """The microbatches of one composite tensor, put together as a step puts them together."""
    planned = plan(value, axes=axes)
    slicer = Slicer(planned, [value], microbatches)
    kind = microbatch_spec(planned[0], None)
    parts = range(len(tf.nest.flatten(value, expand_composites=True)))
    return [
        tf.nest.pack_sequence_as(kind, [slicer(part, microbatch) for part in parts], expand_composites=True)
        for microbatch in range(microbatches)
    ]


class TestSlicer:
    def test_along_axis_0(self) -> None:
        x = tf.range(5)
        assert cut(plan(x), [x], 3) == [[[0, 1]], [[2, 3]], [[4]]]

    def test_along_another_axis(self) -> None:
        x = tf.constant([[1, 2, 3], [4, 5, 6]])
        assert cut(plan(x, axes={"a": 1}), [x], 2) == [[[[1, 2], [4, 5]]], [[[3], [6]]]]

    @pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
    @pytest.mark.parametrize("shape_is_known", [True, False])
    def test_joined_again_it_is_the_batch_on_every_axis(self, axis: int, shape_is_known: bool) -> None:
        x = tf.reshape(tf.range(5 * 6 * 7), [5, 6, 7])
        planned = plan(x, axes={"a": axis})
        if not shape_is_known:
            planned = (SplitArgument("a", planned[0].axis, spec(None, None, None, dtype=tf.int32)),)
        slicer = Slicer(planned, [x], 4)
        parts = [slicer(0, microbatch) for microbatch in range(4)]
        assert tf.concat(parts, axis).numpy().tolist() == x.numpy().tolist()
        assert [int(size) for size in slicer.sizes] == [part.shape[axis] for part in parts]

    def test_what_is_passed_whole_comes_to_every_microbatch(self) -> None:
        x, rate = tf.range(4), tf.constant(0.5)
        assert cut(plan(x, rate, non_split="b"), [x, rate], 2) == [[[0, 1], 0.5], [[2, 3], 0.5]]

    def test_one_microbatch_is_the_batch_itself(self) -> None:
        x = tf.range(4)
        assert Slicer(plan(x), [x], 1)(0, 0) is x

    def test_a_slice_is_made_once(self) -> None:
        x = tf.range(4)
        slicer = Slicer(plan(x), [x], 2)
        assert slicer(0, 1) is slicer(0, 1)

    def test_ragged_tensors_part_by_part(self) -> None:
        x, ragged = tf.range(3), tf.ragged.constant([[1], [2, 3], [4, 5, 6]])
        # Per microbatch: x, then the values and the row splits of the ragged tensor.
        assert cut(plan(ragged, x), [ragged, x], 2) == [[[1, 2, 3], [0, 1, 3], [0, 1]], [[4, 5, 6], [0, 3], [2]]]

    def test_a_ragged_tensor_of_two_ragged_axes(self) -> None:
        ragged = tf.ragged.constant([[[1], [2, 3]], [], [[4]]])
        found = [part.to_list() for part in composite_parts(ragged, 3)]
        assert found == [[[[1], [2, 3]]], [[]], [[[4]]]]

    @pytest.mark.parametrize(
        ("axis", "expected"), [(0, [[[1, 0, 2]], [[0, 3, 0]]]), (1, [[[1, 0], [0, 3]], [[2], [0]]])]
    )
    def test_sparse_tensors_along_any_axis(self, axis: int, expected: Any) -> None:
        sparse = tf.sparse.from_dense([[1, 0, 2], [0, 3, 0]])
        found = [tf.sparse.to_dense(part) for part in composite_parts(sparse, 2, axes={"a": axis})]
        assert [value.numpy().tolist() for value in found] == expected


class TestUnknownBatchSize:
    def run(self, microbatches: int, *arrays: np.ndarray) -> list[list[list[int]]]:
        """Cuts arrays in one graph that serves all batch sizes; returns the parts of each."""
        planned = [
            SplitArgument(name, 0, tf.TensorSpec([None, *array.shape[1:]], array.dtype))
            for name, array in zip("ab", arrays, strict=False)
        ]

        @tf.function(input_signature=[argument.spec for argument in planned], autograph=False)
        def traced(*values: tf.Tensor) -> list[list[tf.Tensor]]:
            slicer = Slicer(planned, values, microbatches)
            assert all(isinstance(size, tf.Tensor) for size in slicer.sizes)
            return [[slicer(n, m) for m in range(microbatches)] for n in range(len(values))]

        return [[part.numpy().tolist() for part in parts] for parts in traced(*arrays)]

    @pytest.mark.parametrize(
        ("batch", "parts"),
        [
            (4, [[0], [1], [2], [3]]),
            (6, [[0, 1], [2, 3], [4], [5]]),
            (9, [[0, 1, 2], [3, 4], [5, 6], [7, 8]]),
        ],
    )
    def test_the_cut_is_that_of_a_known_one(self, batch: int, parts: list[list[int]]) -> None:
        assert self.run(4, np.arange(batch)) == [parts]

    def test_too_few_samples_end_the_step(self) -> None:
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="fewer samples than the 4 microbatches it is cut into"
        ):
            self.run(4, np.arange(3))

    def test_arguments_of_different_batch_size_end_the_step(self) -> None:
        with pytest.raises(tf.errors.InvalidArgumentError, match="same number of samples: those of b and a differ"):
            self.run(2, np.arange(4), np.arange(5))

    def test_of_a_ragged_and_a_sparse_tensor(self) -> None:
        ragged, sparse = tf.ragged.constant([[1], [2, 3], []]), tf.sparse.from_dense([[1, 0], [0, 2], [0, 0]])
        planned = [
            SplitArgument("a", 0, tf.RaggedTensorSpec([None, None], tf.int32)),
            SplitArgument("b", 0, tf.SparseTensorSpec([None, 2], tf.int32)),
        ]

        @tf.function(input_signature=[[argument.spec for argument in planned]], autograph=False)
        def traced(values: Any) -> Any:
            slicer = Slicer(planned, values, 2)
            return [slicer(part, 0) for part in range(5)]

        values, splits, indices, kept, shape = (part.numpy().tolist() for part in traced([ragged, sparse]))
        assert (values, splits) == ([1, 2, 3], [0, 1, 3])
        assert (indices, kept, shape) == ([[0, 0], [1, 1]], [1, 2], [2, 2])
