"""How many programs a step makes for the batches it is given, and what is said when there come to be many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import smp_tf as smp
from smp_tf import announce
from smp_tf.errors import StepError
from tests.smp_tf.steps.test_step import Sum

X = np.arange(60, dtype=np.float32).reshape(20, 3)


@pytest.fixture
def model(init: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Sum:
    monkeypatch.setattr(announce, "_said", set())
    init(microbatches=4)
    return Sum()


@pytest.fixture
def traced(model: Sum) -> list[tuple[int | None, ...]]:
    """The shape of x in each trace of `sums`."""
    return []


@pytest.fixture
def sums(model: Sum, traced: list[Any]) -> Any:
    @smp.step
    def train(x: tf.Tensor) -> tf.Tensor:
        traced.append(tuple(x.shape))
        return model(x)

    return train


def test_the_third_batch_size_and_all_after_it_share_a_program(
    sums: Any, traced: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    for size in (16, 8, 16, 10, 14, 20, 8):
        assert sums(X[:size]).merge().numpy() == pytest.approx(X[:size].sum(1))
    assert traced == [(4, 3), (2, 3), (None, 3)]
    said = capfd.readouterr().err
    assert said.count("smp_tf: Step 'train' was given batches of 16 and 8 samples, and now one of 10.") == 1


def test_smaller_batches_than_microbatches_have_programs_of_their_own(sums: Any, traced: list[Any]) -> None:
    for size in (8, 3, 2, 3, 12):
        assert len(sums(X[:size]).outputs) == min(size, 4)
    assert traced == [(2, 3), (1, 3), (1, 3), (3, 3)]


def test_other_shapes_beside_the_batch_size_are_counted_apart(sums: Any, traced: list[Any]) -> None:
    for size in (8, 12):
        sums(X[:size])
    ragged = tf.ragged.constant([[1.0]])
    assert ragged.shape.rank == 2
    assert traced == [(2, 3), (3, 3)]


class TestInputSignature:
    @pytest.fixture
    def step(self, model: Sum, traced: list[Any]) -> Any:
        @smp.step(input_signature=[tf.TensorSpec([None, 3], tf.float32)])
        def train(x: tf.Tensor) -> tf.Tensor:
            traced.append(tuple(x.shape))
            return model(x)

        return train

    @pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
    def test_one_program_takes_all_batch_sizes(self, step: Any, traced: list[Any], in_graph: bool) -> None:
        def sums(x: Any) -> Any:
            return step(x).merge()

        run = tf.function(sums) if in_graph else sums
        for size in (16, 8, 10, 11):
            assert run(tf.constant(X[:size])).numpy() == pytest.approx(X[:size].sum(1))
        assert traced == [(None, 3)]

    def test_arrays_of_another_type_are_cast(self, step: Any) -> None:
        assert step(X[:8].astype(np.float64)).merge().dtype == tf.float32

    @pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
    def test_a_smaller_batch_than_microbatches_takes_another(
        self, step: Any, traced: list[Any], in_graph: bool
    ) -> None:
        def sums(x: Any) -> Any:
            found = step(x)
            return found.merge(), len(found.outputs)

        run = tf.function(sums) if in_graph else sums
        run(tf.constant(X[:8]))
        merged, count = run(tf.constant(X[:3]))
        assert merged.numpy() == pytest.approx(X[:3].sum(1))
        assert int(count) == 3
        assert traced == [(None, 3), (1, 3)]

    def test_the_first_batch_must_not_be_smaller(self, step: Any) -> None:
        with pytest.raises(StepError, match=r"first batch of step 'train' has 3 samples, fewer than the 4 micro"):
            step(X[:3])

    def test_where_nothing_says_the_size_it_is_an_error_when_it_comes(self, step: Any) -> None:
        run = tf.function(lambda x: step(x).merge(), input_signature=[tf.TensorSpec([None, 3], tf.float32)])
        assert run(X[:8]).shape == [8]
        with pytest.raises(tf.errors.InvalidArgumentError, match="batch has fewer samples than the 4 microbatches"):
            run(X[:3])


class TestAdvice:
    def test_python_values_that_change_are_named_once(self, model: Sum, capfd: pytest.CaptureFixture[str]) -> None:
        @smp.step
        def train(x: tf.Tensor, rate: float, training: bool = True) -> tf.Tensor:
            return model(x) * rate

        for number in range(4):
            train(X[:8], 0.5**number)
        assert "non_split_inputs" not in capfd.readouterr().err
        for number in range(4, 7):
            train(X[:8], 0.5**number)
        said = capfd.readouterr().err
        assert said.count("Step 'train' was traced and planned 5 times") == 1
        assert "change: rate = 1.0, 0.5, 0.25, 0.125, 0.0625. Each value is a program of its own." in said

    def test_as_a_tensor_one_program_takes_all(self, model: Sum) -> None:
        traced = []

        @smp.step(non_split_inputs=["rate"])
        def train(x: tf.Tensor, rate: Any) -> tf.Tensor:
            traced.append(1)
            return model(x) * rate

        for number in range(6):
            train(X[:8], tf.constant(0.5**number))
        assert len(traced) == 1

    def test_shapes_that_change_are_told(self, model: Sum, capfd: pytest.CaptureFixture[str]) -> None:
        @smp.step
        def train(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            return model(x) + tf.reduce_sum(y)

        for width in range(1, 6):
            train(X[:8], tf.ones([8, width]))
        assert capfd.readouterr().err.count("planned for 5 shapes or types of its tensors, besides the batch size") == 1


@pytest.mark.parametrize("option", ["reduce_retracing", "experimental_relax_shapes"])
def test_reduced_retracing_leaves_the_size_open_from_the_start(
    option: str, model: Sum, capfd: pytest.CaptureFixture[str]
) -> None:
    traced = []

    @smp.step(**{option: True})
    def train(x: tf.Tensor) -> tf.Tensor:
        traced.append(tuple(x.shape))
        return model(x)

    for size in (8, 12, 10):
        assert train(X[:size]).merge().numpy() == pytest.approx(X[:size].sum(1))
    assert traced == [(None, 3)]
    assert "was given batches" not in capfd.readouterr().err


@pytest.mark.parametrize("option", ["jit_compile", "experimental_compile"])
def test_one_step_can_be_compiled_with_xla(option: str, model: Sum) -> None:
    @smp.step(**{option: True})
    def train(x: tf.Tensor) -> tf.Tensor:
        return model(x)

    assert train(X[:8]).merge().numpy() == pytest.approx(X[:8].sum(1))
    (program,) = train._programs.values()
    (function,) = program.stage_program.functions.values()
    assert function.function.function_def.attr["_XlaMustCompile"].b


def test_a_step_that_needs_its_batch_size_gets_a_program_for_each(
    model: Sum, capfd: pytest.CaptureFixture[str]
) -> None:
    traced = []

    @smp.step
    def train(x: tf.Tensor) -> tf.Tensor:
        traced.append(x.shape[0])
        return tf.reshape(model(x), [x.shape[0] * 1])

    for size in (16, 8, 12, 20):
        assert train(X[:size]).merge().numpy() == pytest.approx(X[:size].sum(1))
    assert traced == [4, 2, None, 3, 5]
    said = capfd.readouterr().err
    assert said.count("cannot be traced with the batch size left open (TypeError: ") == 1
