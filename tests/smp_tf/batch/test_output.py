"""Every way to put the microbatches of a step's output together, for every kind of value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from smp_tf.batch.output import StepOutput, WeightedSum
from smp_tf.batch.output_description import GradientSum, OutputDescription, OutputHolder
from smp_tf.errors import StepError

EQUAL, UNEQUAL = (1, 1, 1), (3, 2, 2)
HERE, ELSEWHERE = OutputHolder(), OutputHolder(1, is_here=False)

#: A third, that float32 does not hold.
THIRD = 1.0 / 3.0


def output(
    values: Sequence[Any] | None,
    weights: Sequence[Any] = EQUAL,
    gradient: GradientSum | None = None,
    holder: OutputHolder = HERE,
    total: WeightedSum | None = None,
) -> StepOutput:
    return StepOutput(OutputDescription("loss", holder, gradient), values, weights, total)


def floats(*values: Any, dtype: tf.DType = tf.float32) -> list[tf.Tensor]:
    return [tf.constant(value, dtype) for value in values]


def slices(values: list[list[float]], indices: list[int], rows: int = 4) -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant([rows, len(values[0])]))


class TestMean:
    def test_with_equal_microbatches(self) -> None:
        assert output(floats(1.0, 2.0, 6.0)).reduce_mean().numpy() == 3.0

    def test_with_unequal_microbatches_every_sample_weighs_the_same(self) -> None:
        assert output(floats(1.0, 2.0, 9.0), UNEQUAL).reduce_mean().numpy() == pytest.approx((3 + 4 + 18) / 7)

    @pytest.mark.parametrize("dtype", [tf.int32, tf.int64, tf.uint8])
    def test_integers_average_to_floats(self, dtype: tf.DType) -> None:
        mean = output(floats(1, 2, 2, dtype=dtype)).reduce_mean()
        assert mean.dtype == tf.float32
        assert mean.numpy() == pytest.approx(5 / 3)

    def test_truth_averages_to_a_share(self) -> None:
        mean = output([tf.constant([True, False]), tf.constant([True, True]), tf.constant([False, False])])
        assert mean.reduce_mean().numpy().tolist() == pytest.approx([2 / 3, 1 / 3])

    def test_of_tensors_of_any_shape(self) -> None:
        mean = output([tf.fill([2, 3], value) for value in (1.0, 2.0, 9.0)], UNEQUAL).reduce_mean()
        assert mean.numpy() == pytest.approx(np.full([2, 3], 25 / 7))

    def test_of_sparse_slices_stays_sparse(self) -> None:
        parts = [slices([[3.0]], [1]), slices([[6.0]], [3]), slices([[9.0]], [1])]
        mean = output(parts).reduce_mean()
        assert isinstance(mean, tf.IndexedSlices)
        assert mean.indices.numpy().tolist() == [1, 3, 1]
        assert mean.values.numpy().ravel().tolist() == [1.0, 2.0, 3.0]
        assert tf.convert_to_tensor(mean).numpy().ravel().tolist() == [0.0, 4.0, 0.0, 2.0]

    def test_of_sparse_slices_weighted(self) -> None:
        parts = [slices([[7.0]], [1]), slices([[7.0]], [3]), slices([[14.0]], [1])]
        mean = output(parts, UNEQUAL).reduce_mean()
        assert tf.convert_to_tensor(mean).numpy().ravel().tolist() == pytest.approx([0.0, 7.0, 0.0, 2.0])

    @pytest.mark.parametrize(("weights", "expected"), [(EQUAL, [3.0, 4.0]), ((2, 1, 1), [2.5, 3.0])], ids=str)
    def test_of_sparse_tensors(self, weights: Sequence[int], expected: list[float]) -> None:
        parts = [tf.sparse.from_dense([value]) for value in ([1, 0], [0, 12], [8, 0])]
        mean = output(parts, weights).reduce_mean()
        assert tf.sparse.to_dense(mean).numpy().tolist() == [expected]

    def test_of_ragged_tensors_of_the_same_rows(self) -> None:
        parts = [tf.ragged.constant([[1.0], [2.0, 3.0]]), tf.ragged.constant([[4.0], [5.0, 6.0]])]
        assert output(parts, (3, 1)).reduce_mean().to_list() == [[1.75], [2.75, 3.75]]

    @pytest.mark.parametrize("weights", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
    def test_of_one_microbatch_is_its_value(self, weights: Sequence[int]) -> None:
        value = tf.constant(THIRD, tf.float64)
        assert output([value], weights[:1]).reduce_mean().numpy() == THIRD


class TestMeanInFloat64:
    """Averages in float64 once were multiplied by a weight that had been a float32 on the way."""

    def test_is_not_rounded_through_float32_with_equal_microbatches(self) -> None:
        assert output(floats(1.0, 1.0, 1.0, dtype=tf.float64)).reduce_mean().numpy() == 1.0

    def test_is_not_rounded_through_float32_with_unequal_microbatches(self) -> None:
        mean = output(floats(THIRD, THIRD, THIRD, dtype=tf.float64), UNEQUAL).reduce_mean()
        assert mean.dtype == tf.float64
        assert mean.numpy() == pytest.approx(THIRD, rel=1e-15)

    def test_is_not_rounded_through_float32_with_sizes_known_only_when_it_runs(self) -> None:
        weights = floats(*UNEQUAL, dtype=tf.int64)
        mean = output(floats(THIRD, THIRD, THIRD, dtype=tf.float64), weights).reduce_mean()
        assert mean.numpy() == pytest.approx(THIRD, rel=1e-15)

    @pytest.mark.parametrize("total_weight", [7, tf.constant(7, tf.int64), tf.constant(7.0, tf.float64)])
    def test_is_not_rounded_through_float32_where_the_pipeline_accumulated(self, total_weight: Any) -> None:
        total = WeightedSum(tf.constant(7 * THIRD, tf.float64), total_weight)
        mean = output(None, UNEQUAL, GradientSum(), total=total).reduce_mean()
        assert mean.numpy() == pytest.approx(THIRD, rel=1e-15)

    def test_is_not_rounded_through_float32_in_sparse_slices(self) -> None:
        parts = [
            tf.IndexedSlices(tf.constant([[1.0]], tf.float64), tf.constant([0]), tf.constant([2, 1])) for _ in range(3)
        ]
        assert tf.convert_to_tensor(output(parts, UNEQUAL).reduce_mean()).numpy()[0, 0] == pytest.approx(1.0, rel=1e-15)


class TestAccumulatedByThePipeline:
    @pytest.mark.parametrize("total_weight", [4, tf.constant(4, tf.int64)], ids=["known", "as it runs"])
    def test_the_mean_divides_the_total_once(self, total_weight: Any) -> None:
        found = output(None, [1, 1], GradientSum(), total=WeightedSum(tf.constant([8.0, 2.0]), total_weight))
        assert found.reduce_mean().numpy().tolist() == [2.0, 0.5]
        assert found.accumulate().numpy().tolist() == [2.0, 0.5]

    def test_the_sum_is_the_total_where_all_weigh_one(self) -> None:
        found = output(None, [1, 1], GradientSum(), total=WeightedSum(tf.constant(8.0), 4))
        assert found.reduce_sum().numpy() == 8.0

    def test_the_sum_needs_the_values_where_weights_differ(self) -> None:
        found = output(floats(1.0, 2.0, 9.0), UNEQUAL, GradientSum(), total=WeightedSum(tf.constant(25.0), 7))
        assert found.reduce_sum().numpy() == 12.0
        assert found.reduce_mean().numpy() == pytest.approx(25 / 7)

    @pytest.mark.parametrize("read", ["outputs", "concat", "merge", "stack"])
    def test_single_microbatches_were_not_kept(self, read: str) -> None:
        found = output(None, EQUAL, GradientSum(), total=WeightedSum(tf.constant(8.0), 3))
        with pytest.raises(StepError) as raised:
            _ = found.outputs if read == "outputs" else getattr(found, read)()
        assert str(raised.value) == (
            "loss is a gradient: the pipeline keeps only its sum over the microbatches, not one value for each. Use "
            ".accumulate(), or decorate the step with @smp.step(keep_microbatch_gradients=True)."
        )

    def test_values_that_were_kept_are_where_their_weight_is(self) -> None:
        """It advised to keep the values, which the step did."""
        found = output(None, EQUAL, GradientSum(has_values=True), ELSEWHERE)
        with pytest.raises(StepError) as raised:
            _ = found.outputs
        assert str(raised.value) == (
            "loss is a gradient of a weight that partition 1 stores; this rank does not have its values. Check "
            ".is_local first."
        )
        assert found.accumulate() is None


class TestSum:
    @pytest.mark.parametrize("weights", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
    def test_is_not_weighted(self, weights: Sequence[int]) -> None:
        assert output(floats(1.0, 2.0, 9.0), weights).reduce_sum().numpy() == 12.0

    def test_of_integers_is_an_integer(self) -> None:
        total = output(floats(1, 2, 9, dtype=tf.int64)).reduce_sum()
        assert (total.dtype, total.numpy()) == (tf.int64, 12)

    def test_of_truth_counts(self) -> None:
        total = output([tf.constant([True, False]), tf.constant([True, True])], [1, 1]).reduce_sum()
        assert (total.dtype, total.numpy().tolist()) == (tf.int32, [2, 1])

    def test_of_sparse_slices_stays_sparse(self) -> None:
        total = output([slices([[3.0]], [1]), slices([[6.0]], [1])], [1, 1]).reduce_sum()
        assert isinstance(total, tf.IndexedSlices)
        assert tf.convert_to_tensor(total).numpy().ravel().tolist() == [0.0, 9.0, 0.0, 0.0]

    def test_of_sparse_tensors_is_sparse(self) -> None:
        total = output([tf.sparse.from_dense([[1, 2]]), tf.sparse.from_dense([[0, 3]])], (1, 1)).reduce_sum()
        assert tf.sparse.to_dense(total).numpy().tolist() == [[1, 5]]


class TestJoined:
    @pytest.mark.parametrize("name", ["concat", "merge"])
    def test_microbatches_of_unequal_size_in_order(self, name: str) -> None:
        found = output([tf.constant([[1, 2]] * 2), tf.constant([[3, 4]])], (2, 1))
        assert getattr(found, name)().numpy().tolist() == [[1, 2], [1, 2], [3, 4]]

    @pytest.mark.parametrize("name", ["concat", "merge", "stack"])
    def test_scalars_are_stacked(self, name: str) -> None:
        assert getattr(output(floats(1.0, 2.0, 9.0)), name)().numpy().tolist() == [1.0, 2.0, 9.0]

    @pytest.mark.parametrize("dtype", [tf.int32, tf.bool, tf.float64, tf.bfloat16, tf.complex64])
    def test_keeps_the_type(self, dtype: tf.DType) -> None:
        parts = [tf.cast([0, 1], dtype), tf.cast([1, 0], dtype)]
        assert output(parts, [1, 1]).concat().dtype == dtype
        assert output(parts, [1, 1]).stack().dtype == dtype

    def test_text(self) -> None:
        assert output([tf.constant(["a"]), tf.constant(["b"])], [1, 1]).concat().numpy().tolist() == [b"a", b"b"]

    def test_ragged_tensors_stay_ragged(self) -> None:
        found = output([tf.ragged.constant([[1], [2, 3]]), tf.ragged.constant([[]], dtype=tf.int32)], (2, 1))
        assert found.concat().to_list() == [[1], [2, 3], []]

    def test_ragged_tensors_on_a_new_axis(self) -> None:
        found = output([tf.ragged.constant([[1], [2, 3]]), tf.ragged.constant([[4, 5]])], (2, 1))
        assert found.stack().to_list() == [[[1], [2, 3]], [[4, 5]]]

    def test_sparse_tensors_stay_sparse(self) -> None:
        found = output([tf.sparse.from_dense([[1, 0], [0, 2]]), tf.sparse.from_dense([[0, 3]])], (2, 1))
        assert tf.sparse.to_dense(found.concat()).numpy().tolist() == [[1, 0], [0, 2], [0, 3]]
        equal = output([tf.sparse.from_dense([[1, 0]]), tf.sparse.from_dense([[0, 3]])], (1, 1))
        assert tf.sparse.to_dense(equal.stack()).numpy().tolist() == [[[1, 0]], [[0, 3]]]

    @pytest.mark.parametrize("name", ["concat", "merge"])
    def test_sparse_slices_are_joined_as_slices_of_all_rows(self, name: str) -> None:
        """They once became dense: a table of embeddings times the number of microbatches."""
        found = output([slices([[1.0], [5.0]], [0, 0], rows=2), slices([[2.0]], [1], rows=3)], [1, 1])
        joined = getattr(found, name)()
        assert isinstance(joined, tf.IndexedSlices)
        assert (joined.indices.numpy().tolist(), joined.dense_shape.numpy().tolist()) == ([0, 0, 3], [5, 1])
        assert tf.convert_to_tensor(joined).numpy().ravel().tolist() == [6.0, 0.0, 0.0, 2.0, 0.0]

    def test_sparse_slices_are_stacked_to_a_sparse_tensor(self) -> None:
        found = output([slices([[1.0, 2.0], [3.0, 0.0]], [1, 1], 3), slices([[4.0, 5.0]], [0], 3)], [1, 1]).stack()
        assert isinstance(found, tf.SparseTensor)
        assert found.indices.numpy().tolist() == [[0, 1, 0], [0, 1, 1], [1, 0, 0], [1, 0, 1]]
        assert tf.sparse.to_dense(found).numpy().tolist() == [
            [[0.0, 0.0], [4.0, 2.0], [0.0, 0.0]],
            [[4.0, 5.0], [0.0, 0.0], [0.0, 0.0]],
        ]

    def test_sparse_slices_in_a_graph_and_of_vectors(self) -> None:
        @tf.function
        def run(values: tf.Tensor, indices: tf.Tensor) -> Any:
            found = output([tf.IndexedSlices(values, indices, tf.constant([4]))] * 2, [1, 1])
            return found.concat().indices, found.stack()

        indices, stacked = run(tf.constant([1.0, 2.0]), tf.constant([3, 1], tf.int64))
        assert indices.numpy().tolist() == [3, 1, 7, 5]
        assert tf.sparse.to_dense(stacked).numpy().tolist() == [[0.0, 2.0, 0.0, 1.0]] * 2

    @pytest.mark.parametrize("name", ["concat", "stack"])
    def test_sparse_slices_of_an_unknown_shape_cannot_be_joined(self, name: str) -> None:
        part = tf.IndexedSlices(tf.constant([[1.0]]), tf.constant([1]))
        with pytest.raises(StepError, match=r"loss is sparse slices that do not say of which shape"):
            getattr(output([part, part], [1, 1]), name)()

    def test_stack_makes_a_new_axis(self) -> None:
        assert output([tf.constant([1, 2]), tf.constant([3, 4])], [1, 1]).stack().numpy().tolist() == [[1, 2], [3, 4]]

    def test_outputs_are_the_values_in_order_and_a_list_of_one_s_own(self) -> None:
        values = floats(1.0, 2.0, 9.0)
        found = output(values)
        found.outputs.clear()
        assert [a is b for a, b in zip(found.outputs, values, strict=True)] == [True] * 3


class TestAccumulate:
    @pytest.mark.parametrize("method", ["variable", "add_n", "accumulate_n"])
    def test_every_method_gives_the_mean(self, method: str) -> None:
        assert output(floats(1.0, 2.0, 9.0), UNEQUAL).accumulate(method=method).numpy() == pytest.approx(25 / 7)

    def test_into_a_variable(self) -> None:
        variable = tf.Variable(0.0)
        assert output(floats(1.0, 2.0, 6.0)).accumulate(var=variable).numpy() == 3.0
        assert variable.numpy() == 3.0

    def test_an_unknown_method_is_an_error_that_names_the_known_ones(self) -> None:
        with pytest.raises(StepError) as raised:
            output(floats(1.0, 2.0, 6.0)).accumulate(method="mean")
        assert str(raised.value) == (
            'accumulate takes method "variable", "add_n" or "accumulate_n". Received: method=\'mean\''
        )


class TestElsewhere:
    def test_a_gradient_of_another_rank_is_none(self) -> None:
        found = output(None, EQUAL, GradientSum(), ELSEWHERE)
        assert found.accumulate() is None
        assert found.reduce_mean() is None
        assert found.reduce_sum() is None
        assert not found.is_local

    def test_a_gradient_of_another_rank_is_not_put_into_a_variable(self) -> None:
        variable = tf.Variable(5.0)
        assert output(None, EQUAL, GradientSum(), ELSEWHERE).accumulate(var=variable) is None
        assert variable.numpy() == 5.0

    @pytest.mark.parametrize("read", ["outputs", "accumulate", "reduce_mean", "reduce_sum", "concat", "merge", "stack"])
    def test_reading_a_local_output_of_another_rank_is_an_error(self, read: str) -> None:
        found = output(None, EQUAL, holder=OutputHolder(2, is_here=False))
        with pytest.raises(StepError) as raised:
            _ = found.outputs if read == "outputs" else getattr(found, read)()
        assert str(raised.value) == (
            "loss stays on partition 2 (it is among local_outputs); this rank does not have it. Check .is_local first, "
            "or take it out of local_outputs."
        )

    def test_it_says_where_it_is(self) -> None:
        assert (
            repr(output(None, EQUAL, holder=OutputHolder(2, is_here=False)))
            == "<StepOutput loss of 3 microbatches, on partition 2>"
        )
        assert repr(output(floats(1.0, 2.0, 9.0))) == "<StepOutput loss of 3 microbatches>"


@pytest.mark.parametrize("weights", [EQUAL, UNEQUAL, "as it runs"], ids=str)
def test_in_a_graph_it_is_the_same(weights: Any) -> None:
    @tf.function
    def traced(values: list[tf.Tensor], sizes: list[tf.Tensor]) -> list[tf.Tensor]:
        found = output(values, sizes if weights == "as it runs" else weights)
        return [found.reduce_mean(), found.reduce_sum(), found.stack()]

    mean, total, stacked = traced(floats(1.0, 2.0, 9.0), floats(*UNEQUAL, dtype=tf.int64))
    assert mean.numpy() == pytest.approx(4.0 if weights == EQUAL else 25 / 7)
    assert (total.numpy(), stacked.numpy().tolist()) == (12.0, [1.0, 2.0, 9.0])
