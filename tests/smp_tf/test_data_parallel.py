"""Sums over replicas: one Horovod operation for all tensors, and none where there is one replica."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from smp_tf import data_parallel, gradient_marks
from smp_tf.data_parallel import sum_over_replicas
from smp_tf.sparse_gradients import weighted_sum


@pytest.fixture
def reduced(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What Horovod was asked to reduce, on a rank of three replicas that all hold the same values."""
    import horovod.tensorflow as hvd

    asked: list[dict[str, Any]] = []

    def grouped_allreduce(tensors: list[tf.Tensor], **kwargs: Any) -> list[tf.Tensor]:
        asked.append({"types": [t.dtype for t in tensors], **kwargs})
        return [t * 3 for t in tensors]

    def allgather(tensor: tf.Tensor, **kwargs: Any) -> tf.Tensor:
        asked.append({"gathered": tensor.dtype, **kwargs})
        return tf.concat([tensor] * 3, 0)

    running = SimpleNamespace(
        topology=SimpleNamespace(group_size=lambda kind: {"dp": 3}[kind.value], dp_size=3),
        process_sets=SimpleNamespace(dp="the set of this stage"),
        config=SimpleNamespace(gradient_compression=None, gradient_offload=False),
    )
    monkeypatch.setattr(data_parallel.runtime, "current", lambda: running)
    monkeypatch.setattr(hvd, "grouped_allreduce", grouped_allreduce)
    monkeypatch.setattr(hvd, "allgather", allgather)
    return asked


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


def test_averages_leave_out_what_is_none_or_averaged_already(reduced: list[dict[str, Any]]) -> None:
    done = gradient_marks.mark_averaged(tf.constant([7.0]))
    first, none, same, other = data_parallel.average_gradients([tf.constant([1.0, 2.0]), None, done, tf.constant(4.0)])
    assert (first.numpy().tolist(), none, same is done, float(other)) == ([1.0, 2.0], None, True, 4.0)
    assert [(asked["types"], asked["name"]) for asked in reduced] == [([tf.float32] * 2, "smp_average_float32")]
    assert all(map(gradient_marks.is_averaged, (first, same, other)))
    again = data_parallel.average_gradients([first, same])
    assert (again[0] is first, again[1] is same, len(reduced)) == (True, True, 1)


def test_the_average_of_sparse_slices_is_sparse(reduced: list[dict[str, Any]]) -> None:
    slices = tf.IndexedSlices(tf.constant([[3.0]]), tf.constant([1]), tf.constant([2, 1]))
    (average,) = data_parallel.average_gradients([slices])
    assert isinstance(average, tf.IndexedSlices)
    assert average.values.numpy().tolist() == [[1.0], [1.0], [1.0]]
    assert tf.convert_to_tensor(average).numpy().tolist() == [[0.0], [3.0]]
    assert [asked["gathered"] for asked in reduced] == [tf.float32, tf.int32]


def test_within_a_graph_one_average_comes_behind_the_other(reduced: list[dict[str, Any]]) -> None:
    """Since all of them have one name, of which Horovod takes one at a time."""

    @tf.function
    def twice(x: tf.Tensor) -> Any:
        first = data_parallel.average_gradients([x])
        return first + data_parallel.average_gradients([2.0 * x])

    assert [float(t) for t in twice(tf.constant(1.0))] == [1.0, 2.0]
    assert {asked["name"] for asked in reduced} == {"smp_average_float32"}
    graph = twice.get_concrete_function(tf.TensorSpec([])).graph
    # What is given and what came back, of the first and of the second.
    passes = [op for op in graph.get_operations() if op.type == "SmpAtRunTime"]
    assert len(passes) == 4
    assert passes[1] in passes[2].control_inputs


@pytest.mark.parametrize("weights", [[2, 1], "as it runs"], ids=["known", "as it runs"])
def test_sparse_gradients_of_all_microbatches_and_replicas_are_gathered(
    reduced: list[dict[str, Any]], weights: Any
) -> None:
    """They were once refused where there are replicas."""
    parts = [
        tf.IndexedSlices(tf.constant([[1.0], [2.0]], tf.bfloat16), tf.constant([3, 1]), tf.constant([4, 1])),
        tf.IndexedSlices(tf.constant([[5.0]], tf.bfloat16), tf.constant([3]), tf.constant([4, 1])),
    ]
    given = [tf.constant(2, tf.int64), tf.constant(1, tf.int64)] if weights == "as it runs" else weights
    total = weighted_sum(parts, given, "gradients_7_2")
    assert total.values.dtype == tf.bfloat16
    assert tf.cast(total.values, tf.float32).numpy().ravel().tolist() == [2.0, 4.0, 5.0] * 3
    assert total.indices.numpy().tolist() == [3, 1, 3] * 3
    assert total.dense_shape.numpy().tolist() == [4, 1]
    common = {"process_set": "the set of this stage", "ignore_name_scope": False}
    assert reduced == [
        {"gathered": tf.float32, "name": "gradients_7_2_values", **common},
        {"gathered": tf.int32, "name": "gradients_7_2_indices", **common},
    ]


def test_names_do_not_depend_on_how_many_functions_were_traced(reduced: list[dict[str, Any]]) -> None:
    """A replica that traced a function once more than another waited for it under another name, for good."""

    def average(gradient: tf.Tensor) -> Any:
        return data_parallel.average_gradients([gradient, None]) + data_parallel.average_gradients([gradient])

    for size in (3, 4):
        tf.function(average).get_concrete_function(tf.TensorSpec([size]))
        # Nothing to average takes no name.
        data_parallel.average_gradients([None])
    assert [asked["name"] for asked in reduced] == ["smp_average_float32"] * 4


def test_the_buffer_of_horovod_is_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOROVOD_FUSION_THRESHOLD", raising=False)
    assert [data_parallel.averaging_bytes(replicas) for replicas in (1, 2, 8)] == [0, 128 << 20, 128 << 20]
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1048576")
    assert data_parallel.averaging_bytes(2) == 1 << 20
