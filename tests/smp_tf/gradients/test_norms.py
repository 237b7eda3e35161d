"""How the squares of all stages become one norm, and which lists TensorFlow's own functions leave to smp_tf."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf

import smp_tf as smp
from smp_tf.batch.output import StepOutput
from smp_tf.batch.output_description import GradientSum, OutputDescription
from smp_tf.gradients import norms
from smp_tf.gradients.norms import NormPatch
from smp_tf.replicas.gradient_marks import comes_from_a_step, mark

ABSENT = -1.0


def together(*parts: list[float]) -> float:
    return float(norms._by_entry([tf.constant(part, tf.float64) for part in parts])[0])


class TestByEntry:
    def test_an_entry_counts_once_whoever_has_it(self) -> None:
        assert together([4.0, ABSENT, ABSENT, 0.5], [ABSENT, 2.0, 1.0, 0.5]) == 7.5

    def test_an_entry_nobody_has_does_not_count(self) -> None:
        assert together([ABSENT, 1.0], [ABSENT, ABSENT]) == 1.0
        assert together([ABSENT], [ABSENT]) == 0.0

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_what_is_not_finite_stays_so(self, value: float) -> None:
        assert together([1.0, ABSENT], [ABSENT, value]) == pytest.approx(value, nan_ok=True)

    def test_different_gradients_in_one_place_are_an_error(self) -> None:
        with pytest.raises(tf.errors.InvalidArgumentError, match="one entry stands for different gradients"):
            together([1.0, 2.0], [3.0, 2.0])


@pytest.fixture
def one(init: Callable[..., None]) -> None:
    init()


@pytest.mark.usefixtures("one")
class TestOnePartition:
    def test_it_is_tensorflows_norm(self) -> None:
        sparse = tf.IndexedSlices(tf.constant([[3.0]]), tf.constant([1]), tf.constant([4, 1]))
        norm = smp.global_norm([sparse, None, tf.constant([4.0])])
        assert (float(norm), norm.dtype) == (5.0, tf.float32)

    def test_the_widest_type_is_the_results(self) -> None:
        assert smp.global_norm([tf.constant([3.0], tf.float64), tf.constant([4.0])]).dtype == tf.float64
        assert smp.global_norm([tf.constant([3.0], tf.bfloat16)]).dtype == tf.float32

    def test_bfloat16_is_squared_as_float32(self) -> None:
        # In bfloat16 half of 257 is 128.
        assert float(smp.global_norm([tf.ones([257], tf.bfloat16)])) == pytest.approx(257.0**0.5, rel=1e-6)

    def test_nothing_has_the_norm_zero(self) -> None:
        assert float(smp.global_norm([])) == 0.0
        assert float(smp.global_norm([None, None])) == 0.0

    def test_outputs_of_a_step_are_averaged_first(self) -> None:
        gradient = OutputDescription("g", gradient=GradientSum())
        output = StepOutput(gradient, [tf.constant([2.0]), tf.constant([4.0])], [1, 1])
        assert float(smp.global_norm([output])) == 3.0

    def test_clipping(self) -> None:
        clipped, norm = smp.clip_by_global_norm([tf.constant([3.0]), None, tf.constant([4.0], tf.bfloat16)], 1.0)
        assert float(norm) == 5.0
        assert clipped[0].numpy().tolist() == pytest.approx([0.6])
        assert clipped[1] is None
        assert clipped[2].dtype == tf.bfloat16
        (same,), _ = smp.clip_by_global_norm([tf.constant([3.0])], 4.0)
        assert same.numpy().tolist() == [3.0]
        (half,), _ = smp.clip_by_global_norm([tf.constant([3.0])], 2.0, use_norm=4.0)
        assert half.numpy().tolist() == [1.5]

    def test_what_is_no_list_is_an_error(self) -> None:
        with pytest.raises(TypeError, match=r"list or a tuple\. Received: dict"):
            smp.global_norm({})  # type: ignore[arg-type]


class TestMarks:
    def test_eager_tensors_bear_them_and_what_is_made_of_them_does_not(self) -> None:
        gradient = mark(tf.constant([1.0]), is_of_step=True)
        assert comes_from_a_step(gradient)
        assert not comes_from_a_step(gradient * 2.0)
        assert not comes_from_a_step(tf.constant([1.0]))
        assert not comes_from_a_step(None)

    def test_in_a_graph_they_are_found_through_ops_branches_and_sparse_slices(self) -> None:
        found = []

        @tf.function
        def run(x: tf.Tensor) -> None:
            gradient = mark(x + 1.0, is_of_step=True)
            other = x * 3.0
            found.append([comes_from_a_step(t) for t in (gradient, gradient * 2.0, other, tf.constant(1.0))])
            found.append([comes_from_a_step(tf.IndexedSlices(gradient[:1], [0]))])
            tf.cond(
                tf.reduce_sum(x) > 0.0,
                lambda: found.append([comes_from_a_step(gradient * 2.0), comes_from_a_step(other * 2.0)]),
                lambda: None,
            )

        run(tf.ones([2]))
        assert found == [[True, True, False, False], [True], [True, False]]


class AskedError(Exception):
    pass


@pytest.fixture
def patch(
    init: Callable[..., None], two_partitions: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[NormPatch]:
    """As on one of two ranks, with an exception where all stages would be asked."""
    init()
    two_partitions()

    def ask(*_: Any) -> Any:
        raise AskedError

    monkeypatch.setattr(norms, "over_stages", ask)
    patch = NormPatch(lambda: False)
    patch.install()
    yield patch
    patch.remove()


class TestPatch:
    X = tf.constant([3.0, 4.0])

    @pytest.mark.parametrize(
        "spread",
        [
            [mark(tf.constant(1.0), is_of_step=True)],
            [X, None],
            [None, None],
            (mark(tf.constant(1.0), is_of_step=True), X),
        ],
        ids=["marked", "none", "nothing", "tuple"],
    )
    def test_lists_of_a_steps_gradients_are_asked_of_all_stages(self, patch: NormPatch, spread: Any) -> None:
        with pytest.raises(AskedError):
            tf.linalg.global_norm(spread)
        with pytest.raises(AskedError):
            tf.clip_by_global_norm(spread, 1.0)

    def test_other_lists_stay_tensorflows_own(self, patch: NormPatch) -> None:
        assert float(tf.linalg.global_norm([self.X])) == 5.0

        @tf.function
        def run() -> tf.Tensor:
            return tf.linalg.global_norm([self.X * 2.0, None])

        assert float(run()) == 10.0
        assert float(tf.clip_by_global_norm([self.X, None], 1.0, use_norm=tf.constant(2.0))[1]) == 2.0

    def test_a_step_sees_all_gradients_itself(self, patch: NormPatch) -> None:
        patch.remove()
        within = NormPatch(lambda: True)
        within.install()
        try:
            assert float(tf.linalg.global_norm([mark(tf.constant([2.0])), None])) == 2.0
        finally:
            within.remove()

    def test_it_comes_once_and_goes_without_a_trace(self, patch: NormPatch) -> None:
        assert patch.install() is False
        patch.remove()
        patch.remove()
        assert float(tf.linalg.global_norm([self.X, None])) == 5.0
