"""On the way from a function to a program stand five values, and each can be looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

import smp_tf as smp
from smp_tf.batch.cut_batch import CutBatch
from smp_tf.steps import preparation


def test_the_values_between_a_function_and_its_program(
    init: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    original = preparation.stage_program

    def look(step: Any, agreed: Any, owned: Any, **options: Any) -> Any:
        given.update(step=step, agreed=agreed, owned=owned)
        return original(step, agreed, owned, **options)

    monkeypatch.setattr(preparation, "stage_program", look)
    init(microbatches=4)
    model = smp.DistributedModel(tf_keras.Sequential([layers.Dense(1, use_bias=False, name="only")], name="net"))

    @smp.step
    def train(x: tf.Tensor) -> tf.Tensor:
        return model(x)

    train(tf.ones([10, 3]))
    step, agreed, owned = given["step"], given["agreed"], given["owned"]
    assert (step.batch.microbatches, step.batch.sizes) == (4, (3, 3, 2, 2))
    assert (step.batch.size, step.batch.samples) == (None, 3)
    assert [variable.name for variable in step.traced.lowered.graph.variables] == ["only/kernel"]
    assert (step.decides, step.is_first) == (True, True)
    assert agreed.plan.units == {"net/net/only": 0}
    assert [variable.name for variable in owned.variables.values()] == ["only/kernel:0"]
    assert [decision.variable.name for decision in owned.decided] == ["only/kernel:0"]
    assert owned.receivers == {}
    for value in (step.batch, step.traced, agreed, owned):
        assert repr(value).startswith(f"{type(value).__name__}(")


def test_microbatches_of_an_open_size_count_as_one_sample() -> None:
    assert (CutBatch((), 2, ()).size, CutBatch((), 2, ()).samples) == (None, 1)
    assert (CutBatch((), 2, (4, 4)).size, CutBatch((), 2, (4, 4)).samples) == (4, 4)
