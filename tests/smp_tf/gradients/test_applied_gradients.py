"""Which gradients an optimizer may be given where steps average none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tensorflow as tf
import tf_keras

import smp_tf as smp
from smp_tf.batch.output import StepOutput, WeightedSum
from smp_tf.batch.output_description import GradientSum, OutputDescription
from smp_tf.config.config import Config
from smp_tf.errors import StepError
from smp_tf.gradients.applied_gradients import Wanted, _wanted, require_applicable
from smp_tf.job import runtime
from smp_tf.partition.layout import Layout
from smp_tf.partition.spread import EVERYWHERE, Partial, SplitOver, Whole


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is one of two replicas, whose steps average nothing."""
    running = SimpleNamespace(
        config=Config(gradient_compression="1bit"), topology=SimpleNamespace(replicas=2, stages=1)
    )
    for name in ("current", "current_or_none"):
        monkeypatch.setattr(runtime, name, lambda: running)


def accumulated(*, is_averaged: bool) -> tf.Tensor:
    gradient = OutputDescription("g", gradient=GradientSum(EVERYWHERE if is_averaged else Partial("D")))
    return StepOutput(gradient, None, [1], WeightedSum(tf.constant([3.0, 6.0]), 3)).accumulate()


def test_an_optimizer_that_does_not_average_is_refused(replicas: None) -> None:
    unaveraged, weight = accumulated(is_averaged=False), tf.Variable([1.0, 1.0], name="w")
    sgd = tf_keras.optimizers.SGD()
    with pytest.raises(StepError, match=r"SGD does not, and was given that of 'w:0'\. Use one of these two"):
        require_applicable(sgd, [(None, weight), (unaveraged, weight)], averages=False)
    scaled = tf_keras.mixed_precision.LossScaleOptimizer(smp.OneBitAdam())
    with pytest.raises(StepError, match=r"LossScaleOptimizer\w* would decide on each by these alone"):
        require_applicable(scaled, [(unaveraged, weight)], averages=False)
    require_applicable(smp.OneBitAdam(), [(unaveraged, weight)], averages=True)
    # What no step has made belongs to the script.
    require_applicable(sgd, [(tf.constant([1.0, 1.0]), weight)], averages=False)


def test_a_function_that_xla_compiles_is_refused(replicas: None) -> None:
    weight = tf.Variable(1.0)

    @tf.function(jit_compile=True)
    def apply() -> None:
        require_applicable(smp.OneBitAdam(), [(tf.constant(1.0), weight)], averages=True)

    with pytest.raises(StepError, match=r"jit_compile=True, and the optimizer averages them over the replicas"):
        apply()


FIRST, SECOND = ({"P": 0, "D": replica, "T": 0} for replica in (0, 1))
OF_FIRST = Whole("D", 0, 2)


@pytest.mark.parametrize(
    ("layout", "on_first", "on_second"),
    [
        # All replicas update it, each by its own gradient, as where nothing is shared.
        (Layout(0, 0), Wanted.ANYTHING, Wanted.ANYTHING),
        # A step gives it to the first replica alone.
        (Layout(0, 0, gradient=OF_FIRST, slots=OF_FIRST), Wanted.ANYTHING, Wanted.NOTHING),
        # A step has given it to all, and the first updates the weight.
        (Layout(0, 0, gradient=EVERYWHERE, slots=OF_FIRST), Wanted.EQUAL, Wanted.EQUAL),
        (Layout(0, 0, slots=SplitOver("D", 0, (0, 1, 3))), Wanted.EQUAL, Wanted.EQUAL),
    ],
)
def test_what_is_not_known_must_fit_the_layout(layout: Layout, on_first: Wanted, on_second: Wanted) -> None:
    assert (_wanted(False, layout, FIRST), _wanted(False, layout, SECOND)) == (on_first, on_second)
    assert _wanted(True, layout, FIRST) is _wanted(True, layout, SECOND) is Wanted.ANYTHING
