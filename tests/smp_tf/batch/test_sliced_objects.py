"""Objects with `smp_slice` as arguments of a step: cut by their own method, eagerly and in a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import smp_tf as smp
from smp_tf.errors import StepError
from tests.smp_tf.steps.test_step import Sum

X = np.arange(24, dtype=np.float32).reshape(8, 3)


class Paired:
    """Samples 0 and 4, 1 and 5, ... belong together: microbatches take them by strides."""

    def __init__(self, x: Any, scale: float, extra: Any = None) -> None:
        self.x, self.scale, self.extra = x, scale, extra

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> Paired:
        assert axis == 0
        return Paired(self.x[mb::num_mb], self.scale, self.extra)


@dataclass(frozen=True)
class Record:
    x: Any

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> Any:
        return {"first": self.x[mb], "rest": [self.x[mb:]]}


@pytest.fixture
def model(init: Callable[..., None]) -> Sum:
    init(microbatches=4)
    return Sum()


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_it_is_cut_by_its_method(model: Sum, in_graph: bool) -> None:
    @smp.step
    def step(batch: Paired) -> Any:
        return batch.x[:, 0] * batch.scale, tf.reduce_sum(model(batch.x))

    def run(x: Any) -> list[Any]:
        first, sums = step(Paired(x, 2.0))
        return [first.outputs, sums.reduce_sum()]

    run = tf.function(run) if in_graph else run
    for x in (X, X + 1.0):
        first, total = run(tf.constant(x))
        assert [value.numpy().tolist() for value in first] == [(2.0 * x[m::4, 0]).tolist() for m in range(4)]
        assert float(total) == pytest.approx(x.sum())


def test_other_tensors_of_the_call_say_how_many_samples_a_microbatch_has(model: Sum) -> None:
    @smp.step
    def step(batch: Paired, y: tf.Tensor) -> Any:
        return tf.reduce_mean(model(batch.x)) * 0.0 + tf.reduce_mean(y)

    y = np.arange(6, dtype=np.float32)
    assert float(step(Paired(X, 1.0), y).reduce_mean()) == pytest.approx(2.5)


def test_a_slice_may_be_of_another_kind_with_other_shapes(model: Sum) -> None:
    @smp.step
    def step(batch: Any) -> Any:
        return tf.shape(batch["rest"][0])[0], tf.reduce_sum(model(batch["first"][None]))

    lengths, _ = step(Record(X))
    assert [int(n) for n in lengths.outputs] == [8, 7, 6, 5]


def test_nested_in_a_structure_and_with_composite_tensors(model: Sum) -> None:
    class Ragged(Paired):
        def smp_slice(self, num_mb: int, mb: int, axis: int) -> Ragged:
            return Ragged(self.x[mb::num_mb], self.scale, self.extra[mb * 2 : mb * 2 + 2])

    @smp.step
    def step(batch: Any) -> Any:
        one = batch["pair"][1]
        return tf.reduce_sum(model(one.x)), tf.reduce_sum(one.extra)

    rows = tf.ragged.constant([[1.0], [2.0, 3.0], [], [4.0], [5.0], [], [], [6.0]])
    _, sums = step({"pair": ("text", Ragged(X, 1.0, rows))})
    assert [float(s) for s in sums.outputs] == [6.0, 4.0, 5.0, 6.0]


def test_passed_whole_it_is_not_cut(model: Sum) -> None:
    @smp.step(non_split_inputs=["batch"])
    def step(x: tf.Tensor, batch: Paired) -> Any:
        return tf.reduce_sum(model(x)), tf.shape(batch.x)[0]

    assert [int(n) for n in step(X, Paired(X, 1.0))[1].outputs] == [8, 8, 8, 8]


def test_the_only_microbatch_is_cut_too(init: Callable[..., None]) -> None:
    init(microbatches=1)
    model = Sum()

    class Marked(Paired):
        def smp_slice(self, num_mb: int, mb: int, axis: int) -> Marked:
            return Marked(self.x * 10.0, self.scale)

    @smp.step
    def step(batch: Marked) -> Any:
        return tf.reduce_sum(model(batch.x))

    eager = step(Marked(X, 1.0)).reduce_sum()
    graph = tf.function(lambda: step(Marked(X, 1.0)).reduce_sum())()
    assert float(eager) == float(graph) == pytest.approx(10.0 * X.sum())


def test_microbatches_of_another_structure_are_refused(model: Sum) -> None:
    class Uneven(Paired):
        def smp_slice(self, num_mb: int, mb: int, axis: int) -> Any:
            return Paired(self.x[mb::num_mb], float(mb))

    @smp.step
    def step(batch: Any) -> Any:
        return model(batch.x)

    with pytest.raises(StepError, match=r"smp_slice of step argument 'batch' must give the same structure .* Micro"):
        step(Uneven(X, 1.0))


def test_no_tensor_of_an_earlier_batch_is_kept(model: Sum) -> None:
    import gc
    import weakref

    @smp.step
    def step(batch: Paired) -> Any:
        return tf.reduce_sum(model(batch.x))

    x = tf.constant(X)
    step(Paired(x, 1.0))
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None
