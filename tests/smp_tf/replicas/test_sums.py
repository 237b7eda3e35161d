"""Sums over replicas: one Horovod operation for all tensors, and none where there is one replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from smp_tf.errors import StepError
from smp_tf.replicas import sums as data_parallel
from smp_tf.replicas.sparse_sums import weighted_sum
from smp_tf.replicas.sums import sum_over_replicas
from tests.smp_tf.replicas.test_reduce_scatter import in_rows, to_one


def test_one_replica_keeps_its_tensors(init: Callable[..., None]) -> None:
    init()
    tensors = [tf.constant(1.0), tf.constant([2.0])]
    assert [a is b for a, b in zip(sum_over_replicas(tensors, "gradients"), tensors, strict=True)] == [True, True]


def test_tensors_of_a_type_are_summed_at_once_over_the_ranks_of_this_stage(reduced: list[dict[str, Any]]) -> None:
    """Horovod refused float32 gradients beside the float64 sum of their weights."""
    import horovod.tensorflow as hvd

    tensors = [tf.constant([1.0, 2.0]), tf.constant(5.0, tf.float64), tf.constant(3.0)]
    sums = sum_over_replicas(tensors, "gradients_7")
    assert [s.numpy().tolist() for s in sums] == [[3.0, 6.0], 15.0, 9.0]
    common = {"op": hvd.Sum, "process_set": "the set of this stage", "ignore_name_scope": True}
    assert reduced == [
        {"types": [tf.float32, tf.float32], "name": "gradients_7_float32", **common},
        {"types": [tf.float64], "name": "gradients_7_float64", **common},
    ]


def test_bfloat16_travels_as_float32(reduced: list[dict[str, Any]]) -> None:
    (total,) = sum_over_replicas([tf.constant([1.5], tf.bfloat16)], "gradients")
    assert reduced[0]["types"] == [tf.float32]
    assert (total.dtype, float(total[0])) == (tf.bfloat16, 4.5)


@pytest.mark.parametrize("dtype", [tf.float16, tf.float64])
def test_other_types_travel_as_they_are(reduced: list[dict[str, Any]], dtype: tf.DType) -> None:
    (total,) = sum_over_replicas([tf.constant([1.5], dtype)], "gradients")
    assert reduced[0]["types"] == [dtype]
    assert total.dtype == dtype


@pytest.mark.parametrize(
    ("dtype", "wire", "values", "total"),
    [
        (tf.complex64, tf.float32, [1 - 2j], [3 - 6j]),
        (tf.complex128, tf.float64, [1 - 2j], [3 - 6j]),
        (tf.uint32, tf.int32, [2**31 - 1, 7], [2**32 + 2**31 - 3 - 2**32, 21]),
        (tf.uint64, tf.int64, [2**62, 7], [3 * 2**62, 21]),
        (tf.int16, tf.int32, [-3], [-9]),
        (tf.uint16, tf.int32, [20000], [60000]),
    ],
)
def test_types_that_horovod_does_not_add_up(
    reduced: list[dict[str, Any]], dtype: tf.DType, wire: tf.DType, values: list[Any], total: list[Any]
) -> None:
    """A complex gradient of replicas was an error of Horovod's at the first step."""
    (found,) = sum_over_replicas([tf.constant(values, dtype)], "gradients")
    assert reduced[0]["types"] == [wire]
    assert (found.dtype, found.numpy().tolist()) == (dtype, total)


def test_what_cannot_be_added_up_is_refused_in_words(reduced: list[dict[str, Any]]) -> None:
    with pytest.raises(StepError, match=r"add up numbers\. Received: tensor 1 of 'g', of type bool\. Cast it to"):
        sum_over_replicas([tf.constant(1.0), tf.constant(True)], "g")
    assert reduced == []


def test_too_many_elements_for_equal_parts_are_summed_by_horovod(
    reduced: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more than 2^31, sizes that are counted as int32 were negative."""
    monkeypatch.setattr(data_parallel, "_MOST_ELEMENTS", 3)
    tensors = [tf.ones(3), tf.ones(1), tf.ones(4, tf.bfloat16)]
    for total in sum_over_replicas(tensors, "gradients", offload=True):
        assert set(tf.cast(total, tf.float32).numpy()) == {3.0}
    assert [call["name"] for call in reduced] == ["gradients_float32_float32", "gradients_bfloat16_float32"]


def test_nothing_to_sum_asks_nobody(reduced: list[dict[str, Any]]) -> None:
    assert sum_over_replicas([], "gradients") == []
    assert reduced == []


@pytest.mark.parametrize("weights", [[2, 1], "as it runs"], ids=["known", "as it runs"])
def test_sparse_gradients_of_all_microbatches_and_replicas_are_gathered(
    reduced: list[dict[str, Any]], weights: Any
) -> None:
    """They were once refused where there are replicas."""
    parts = [
        tf.IndexedSlices(tf.constant([[1.0], [2.0]], tf.bfloat16), tf.constant([3, 1]), tf.constant([40, 1])),
        tf.IndexedSlices(tf.constant([[5.0]], tf.bfloat16), tf.constant([3]), tf.constant([40, 1])),
    ]
    given = [tf.constant(2, tf.int64), tf.constant(1, tf.int64)] if weights == "as it runs" else weights
    total = weighted_sum(parts, given, "gradients_7_2")
    assert total.values.dtype == tf.bfloat16
    assert tf.cast(total.values, tf.float32).numpy().ravel().tolist() == [2.0, 4.0, 5.0] * 3
    assert total.indices.numpy().tolist() == [3, 1, 3] * 3
    assert total.dense_shape.numpy().tolist() == [40, 1]
    common = {"process_set": "the set of this stage", "ignore_name_scope": True}
    assert reduced[0]["name"] == "gradients_7_2_rows_int64"
    assert reduced[1:] == [
        {"gathered": tf.uint16, "name": "gradients_7_2_values", **common},
        {"gathered": tf.int32, "name": "gradients_7_2_indices", **common},
    ]


class TestSumsAtReceivers:
    """On replica 0 of three, which all hold the same values."""

    @pytest.fixture
    def sent(self, reduced: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
        """What Horovod was asked for, beside reductions."""
        import horovod.tensorflow as hvd

        topology = data_parallel.runtime.current().topology
        monkeypatch.setattr(topology, "replica", 0, raising=False)

        def alltoall(vector: tf.Tensor, splits: tf.Tensor, **kwargs: Any) -> tuple[tf.Tensor, None]:
            reduced.append({"splits": splits.numpy().tolist(), "name": kwargs["name"]})
            return tf.concat([vector[: int(splits[0])]] * 3, 0), None

        monkeypatch.setattr(hvd, "alltoall", alltoall)
        return reduced

    def test_each_gets_the_sums_it_is_to_receive(self, sent: list[dict[str, Any]]) -> None:
        tensors = [tf.constant([1.0, 2.0]), tf.constant([7.0]), tf.constant(5.0)]
        sums, _ = data_parallel.sum_gradients_at(tensors, [to_one(0, 2), to_one(2, 1), None], "g")
        assert [total.numpy().tolist() for total in sums] == [[3.0, 6.0], 15.0]
        assert sent[0] == {"splits": [2, 0, 1], "name": "g_float32_to_0"}
        assert [call["name"] for call in sent[1:]] == ["g_float32"]

    def test_a_large_gradient_is_summed_in_a_ring(
        self, sent: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its receiver would have had it as often as there are replicas."""
        monkeypatch.setattr(data_parallel, "_MOST_RECEIVED", 3 * 4 * 2)
        tensors = [tf.ones([3]), tf.constant([1.0, 2.0]), tf.ones([4])]
        sums, _ = data_parallel.sum_gradients_at(tensors, [to_one(0, 3), to_one(0, 2), to_one(1, 4)], "g")
        assert [total.numpy().tolist() for total in sums] == [[3.0] * 3, [3.0, 6.0]]
        assert [call.get("splits", call["name"]) for call in sent] == ["g_float32", [2, 0, 0]]

    @pytest.mark.parametrize(
        ("limit", "of_the_others"),
        [("_MOST_RECEIVED", ["g_float32"]), ("_MOST_ELEMENTS", ["g_float32", "g_float32_float32"])],
    )
    def test_rows_are_delivered_however_large_the_gradient_is(
        self, sent: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, limit: str, of_the_others: list[str]
    ) -> None:
        monkeypatch.setattr(data_parallel, limit, 1)
        tensors = [tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), tf.constant([7.0]), tf.constant(5.0)]
        sums, there = data_parallel.sum_gradients_at(tensors, [in_rows((0, 2, 2, 3), 2), to_one(0, 1), None], "g")
        assert [total.numpy().tolist() for total in sums] == [[[3.0, 6.0], [9.0, 12.0]], [21.0], 15.0]
        assert [call["splits"] for call in sent if "splits" in call] == [[4, 0, 2]]
        assert sorted(call["name"] for call in sent if "splits" not in call) == of_the_others
        assert len(there) == 3
