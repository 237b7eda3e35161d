"""Sums over microbatches that are added up inside the functions that make the summands."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from smp_tf.partition.graph.op_graph import TensorType
from smp_tf.pipeline.run.accumulator import Accumulator, device_of_sum, fits
from smp_tf.pipeline.run.host import HOST


def summing(accumulators: list[Accumulator], values: list[np.ndarray], times: int) -> tf.types.experimental.Callable:
    """A function that adds every value `times` times to its accumulator and returns the sums."""

    @tf.function
    def add() -> None:
        for accumulator, value in zip(accumulators, values, strict=True):
            accumulator.add(tf.constant(value))

    body = add.get_concrete_function()

    @tf.function
    def run() -> list[tf.Tensor]:
        begin = tf.no_op()
        last = [accumulator.clear(begin) for accumulator in accumulators]
        for _ in range(times):
            with tf.control_dependencies(last):
                body()
            last = [op for op in tf.compat.v1.get_default_graph().get_operations() if "PartitionedCall" in op.type][-1:]
        return [accumulator.take(last[0])[0] for accumulator in accumulators]

    return run


def held(accumulator: Accumulator) -> int:
    """Numbers in the storage of an accumulator."""
    return int(tf.size(accumulator._variable))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "complex64", "int32"])
def test_a_sum_has_all_summands_and_leaves_nothing_behind(dtype: str) -> None:
    value = tf.cast([[1, 2], [3, 4]], dtype).numpy()
    accumulator = Accumulator(TensorType(dtype, (2, 2)), "sum")
    run = summing([accumulator], [value], times=3)
    for _ in range(2):
        np.testing.assert_array_equal(tf.cast(run()[0], "complex64"), [[3, 6], [9, 12]])
        assert held(accumulator) == 0


def test_complex_sums_are_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU one ended the process, as TensorFlow has no kernel there that adds them to a variable."""
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [])
    assert device_of_sum(tf.complex64, None) is None
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [f"{kind}:0"])
    assert [device_of_sum(dtype, None) for dtype in (tf.complex64, tf.complex128, tf.float32)] == [HOST, HOST, None]
    assert device_of_sum(tf.complex64, "/CPU:1") == "/CPU:1"
    assert Accumulator(TensorType("complex64", (2,)), "sum")._device == HOST


def test_sums_of_several_shapes_are_not_taken_for_each_other() -> None:
    """TensorFlow 2.21 folded the zeros they began with, and took one for another."""
    shapes = [(5,), (12, 5), (12,), (16, 12), (16,), (20, 16), ()]
    accumulators = [Accumulator(TensorType("float32", shape), f"sum_{i}") for i, shape in enumerate(shapes)]
    sums = summing(accumulators, [np.ones(shape, "float32") for shape in shapes], times=8)()
    assert [tuple(s.shape) for s in sums] == shapes
    assert all((s.numpy() == 8).all() for s in sums)


def test_what_is_computed_from_sums_has_their_own_shapes() -> None:
    """An optimizer with clipnorm failed for every model: TensorFlow's optimizer took all sums to be of one shape."""
    shapes = [(12,), (1,), (3, 12), (12, 1)]
    accumulators = [Accumulator(TensorType("float32", shape), f"sum_{i}") for i, shape in enumerate(shapes)]
    sums = summing(accumulators, [np.full(shape, 0.5, "float32") for shape in shapes], times=4)
    clipped = tf.function(lambda: [tf.clip_by_norm(total, 1.0) for total in sums()])()
    for value, shape in zip(clipped, shapes, strict=True):
        np.testing.assert_allclose(value, np.full(shape, np.prod(shape) ** -0.5), rtol=1e-6)


def test_a_sum_is_known_by_its_shape_when_it_is_traced() -> None:
    accumulator = Accumulator(TensorType("float32", (3, 4)), "sum")
    traced = summing([accumulator], [np.ones((3, 4), "float32")], times=1).get_concrete_function()
    assert [t.shape.as_list() for t in traced.outputs] == [[3, 4]]


def test_what_a_sum_is_emptied_with_is_where_the_sum_is() -> None:
    """Its shape is a constant of the traced graph on the same device, and an argument of the function."""
    accumulator = Accumulator(TensorType("float32", (3, 4)), "sum", "/device:CPU:0")
    emptied = tf.function(lambda: accumulator.take(tf.no_op())[0]).get_concrete_function()
    shapes = [op.inputs[0].op for op in emptied.graph.get_operations() if op.type == "Empty"]
    assert [(op.type, op.device) for op in shapes] == [("Const", "/device:CPU:0")]
    assert [kind.type for kind in emptied.function_def.signature.input_arg].count(tf.int32.as_datatype_enum) == 1


def test_only_numbers_of_known_shape_are_added_up_in_place() -> None:
    assert fits(TensorType("float32", ()))
    assert not fits(TensorType("float32", (None, 2)))
    assert not fits(TensorType("float32", None))
    assert not fits(TensorType("bool", (2,)))
    with pytest.raises(ValueError, match=r"known shape.*'loss'"):
        Accumulator(TensorType("float32", (None,)), "loss")


def test_a_later_trace_of_a_function_makes_its_own() -> None:
    """A second batch shape in a training step that is a tf.function was refused by TensorFlow once."""
    made = []

    @tf.function
    def traced(x: tf.Tensor) -> tf.Tensor:
        made.append(Accumulator(TensorType("float32", (2,)), f"sum_{len(made)}"))
        return x

    traced(tf.ones([1]))
    traced(tf.ones([2]))
    assert len(made) == 2
