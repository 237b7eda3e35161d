"""Sparse gradients of three replicas, which all hold the same, are sent sparse while that is less."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from smp_tf.collectives.interface import order
from smp_tf.replicas import sums
from smp_tf.replicas.sparse_sums import sum_of_slices


def slices(*rows: int, of: int = 10, dtype: tf.DType = tf.float32) -> tf.IndexedSlices:
    """Rows of two columns, of a table of so many rows."""
    values = [[float(row), 1.0] for row in rows]
    indices = tf.constant(rows, tf.int32)
    return tf.IndexedSlices(tf.reshape(tf.constant(values, dtype), [-1, 2]), indices, tf.constant([of, 2]))


def names(reduced: list[dict[str, Any]]) -> list[str]:
    return [asked["name"] for asked in reduced]


def test_few_slices_are_gathered(reduced: list[dict[str, Any]]) -> None:
    # A slice takes 12 bytes, twice a row and its mark 24: as much is sent with 20 slices, and three replicas have 18.
    given = slices(7, 3, 3, 2, 2, 2)
    total = sum_of_slices(given, "g")
    assert names(reduced) == ["g_rows_int64", "g_values", "g_indices"]
    assert total.indices.numpy().tolist() == [7, 3, 3, 2, 2, 2] * 3


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_beside_a_gpu_gathered_slices_of_a_row_are_added_up_on_the_host(
    reduced: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, dtype: tf.DType
) -> None:
    """A GPU adds up in any order: replicas with embeddings rounded otherwise, and their second step was refused."""
    monkeypatch.setattr("smp_tf.replicas.sparse_sums.has_device", lambda: True)

    @tf.function
    def total(given: tf.IndexedSlices) -> tf.IndexedSlices:
        return sum_of_slices(given, "g", [order().handle])

    given = slices(7, 3, 3, dtype=dtype)
    found = total(given)
    assert found.indices.numpy().tolist() == [7, 3]
    assert found.values.dtype == dtype
    assert tf.cast(found.values, tf.float32).numpy().tolist() == [[21.0, 3.0], [18.0, 6.0]]
    graph = total.get_concrete_function(given).graph
    [cond] = [op for op in graph.get_operations() if op.type in ("If", "StatelessIf")]
    branch = graph._get_function(cond.get_attr("else_branch").name).graph
    adding = [op for op in branch.get_operations() if op.type in ("Unique", "UnsortedSegmentSum")]
    assert [op.device.rpartition("/")[2] for op in adding] == ["device:CPU:0"] * 2


def test_many_slices_are_added_up_and_rows_that_nobody_touched_stay_out(reduced: list[dict[str, Any]]) -> None:
    """An optimizer that leaves rows alone of which there are no slices would change them otherwise."""
    total = sum_of_slices(slices(7, 3, 3, 2, 2, 2, 0), "g")
    assert names(reduced) == ["g_rows_int64", "g_table_float32", "g_touched_int32"]
    assert total.indices.numpy().tolist() == [0, 2, 3, 7]
    assert total.values.numpy().tolist() == [[0.0, 3.0], [18.0, 9.0], [18.0, 6.0], [21.0, 3.0]]
    assert (total.indices.dtype, total.dense_shape.numpy().tolist()) == (tf.int32, [10, 2])


def test_a_function_chooses_as_it_runs_and_knows_what_shapes_come(reduced: list[dict[str, Any]]) -> None:
    shapes: list[Any] = []

    @tf.function(input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([None], tf.int32)])
    def total(values: tf.Tensor, indices: tf.Tensor) -> Any:
        given = tf.IndexedSlices(values, indices, tf.constant([10, 2]))
        found = sum_of_slices(given, "g", [order().handle])
        shapes.append((found.values.shape.as_list(), found.indices.shape.as_list()))
        return found.indices

    few, many = slices(7, 3), slices(*[4, 1] * 4)
    assert total(few.values, few.indices).numpy().tolist() == [7, 3] * 3
    assert total(many.values, many.indices).numpy().tolist() == [1, 4]
    assert shapes[-1] == ([None, 2], [None])


@pytest.mark.parametrize(
    ("kind", "dtype", "count", "way"),
    [
        # Sent in two bytes, twice a row and its mark take 16, and one slice 12.
        ("bf16", tf.float32, 5, ["g_table_bf16_parts", "g_table_bf16_sums", "g_touched_int32"]),
        ("bf16", tf.float32, 4, ["g_values", "g_indices"]),
        # Slices of half precision are sent in two bytes, and added up in four.
        (None, tf.float16, 10, ["g_values", "g_indices"]),
        (None, tf.float16, 11, ["g_table_float32", "g_touched_int32"]),
        (None, tf.bfloat16, 11, ["g_table_float32", "g_touched_int32"]),
        (None, tf.bfloat16, 10, ["g_values", "g_indices"]),
        (None, tf.complex64, 7, ["g_table_float32", "g_touched_int32"]),
        (None, tf.complex64, 6, ["g_values", "g_indices"]),
    ],
)
def test_what_is_less_depends_on_how_it_is_sent(
    reduced: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    kind: str | None,
    dtype: tf.DType,
    count: int,
    way: list[str],
) -> None:
    import horovod.tensorflow as hvd

    def alltoall(rows: tf.Tensor, **kwargs: Any) -> tf.Tensor:
        reduced.append({"name": kwargs["name"]})
        return tf.concat([rows[:1]] * 3, 0)

    monkeypatch.setattr(hvd, "alltoall", alltoall)
    monkeypatch.setattr(sums.runtime.current().config, "gradient_compression", kind)
    total = sum_of_slices(slices(*[5] * count, dtype=dtype), "g")
    assert names(reduced)[1:] == way
    assert total.values.dtype == dtype


def test_rows_that_were_touched_have_no_scale_in_common_with_their_values(
    reduced: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rows of small gradients once lost their digits to the ones that travelled in one part with them."""
    import horovod.tensorflow as hvd

    monkeypatch.setattr(hvd, "alltoall", lambda rows, **kwargs: tf.concat([rows[-1:]] * 3, 0))
    monkeypatch.setattr(sums.runtime.current().config, "gradient_compression", "fp16")
    small = tf.IndexedSlices(tf.fill([30, 2], 1e-11), tf.constant([9] * 30), tf.constant([10, 2]))
    total = sum_of_slices(small, "g")
    assert total.indices.numpy().tolist() == [9]
    np.testing.assert_allclose(total.values.numpy(), [[9e-10, 9e-10]], rtol=2.0**-10)


@pytest.mark.parametrize("count", [2, 8], ids=["gathered", "added up"])
def test_slices_of_a_type_that_horovod_does_not_send(reduced: list[dict[str, Any]], count: int) -> None:
    """A complex table was an error of Horovod's at the first step."""
    given = tf.IndexedSlices(tf.fill([count, 2], tf.complex(1.0, -2.0)), tf.constant([4] * count), tf.constant([10, 2]))
    total = sum_of_slices(given, "g")
    assert names(reduced)[1] == ("g_values" if count == 2 else "g_table_float32")
    assert tf.reduce_sum(total.values, 0).numpy().tolist() == [complex(3 * count, -6 * count)] * 2


def test_slices_of_a_tensor_of_unknown_shape_are_gathered(reduced: list[dict[str, Any]]) -> None:
    sum_of_slices(tf.IndexedSlices(tf.ones([9, 2]), tf.constant([1] * 9)), "g")
    assert names(reduced) == ["g_values", "g_indices"]


def test_no_slices_at_all_are_gathered(reduced: list[dict[str, Any]]) -> None:
    assert sum_of_slices(slices(), "g").indices.shape == [0]
    assert names(reduced) == ["g_rows_int64", "g_values", "g_indices"]
