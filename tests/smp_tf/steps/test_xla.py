"""`xla: true` compiles what XLA can, and says what it cannot; the numbers stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import smp_tf as smp
from smp_tf import announce


class Net(smp.DistributedModel):
    def __init__(self, extra: Callable[[tf.Tensor], tf.Tensor]) -> None:
        super().__init__()
        self.hidden = tf_keras.layers.Dense(4, activation="tanh")
        self.head = tf_keras.layers.Dense(1)
        self.extra = extra

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.head(self.extra(self.hidden(x)))


def in_python(x: tf.Tensor) -> tf.Tensor:
    return tf.ensure_shape(tf.py_function(lambda v: v + 1.0, [x], tf.float32), [None, 4])


def trained(model: Net) -> tuple[Any, smp.StepOutput]:
    """The step, and its loss on one batch."""

    @smp.step(input_signature=[tf.TensorSpec([None, 3])])
    def step(x: tf.Tensor) -> Any:
        loss = tf.reduce_mean(model(x) ** 2)
        return tf.gradients(loss, model.trainable_variables), loss

    x = np.linspace(-1, 1, 15, dtype=np.float32).reshape(5, 3)
    gradients, loss = step(x)
    return step, [float(loss.reduce_mean()), *(g.accumulate().numpy() for g in gradients)]


def compiled(step: Any) -> dict[tuple[int, int, int], bool]:
    """By chunk, sweep and part: whether XLA compiles the function."""
    [program] = step._programs.values()
    functions = program.stage_program.functions
    return {s: f.function.function_def.attr["_XlaMustCompile"].b for s, f in functions.items()}


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    ("extra", "expected", "said"),
    [
        (tf.nn.relu, {(0, 0, 0): True, (0, 1, 0): True}, []),
        (
            in_python,
            {(0, 0, 0): False, (0, 1, 0): False},
            ["EagerPyFunc (No registered 'EagerPyFunc' OpKernel for XLA_CPU_JIT"],
        ),
    ],
)
def test_what_xla_can_compile_is_compiled(
    init: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    microbatches: int,
    extra: Callable[[tf.Tensor], tf.Tensor],
    expected: dict[tuple[int, int, int], bool],
    said: list[str],
) -> None:
    monkeypatch.setattr(announce, "_said", set())
    init(microbatches=microbatches)
    _, plain = trained(Net(extra))
    smp.shutdown()
    tf_keras.backend.clear_session()
    init(microbatches=microbatches, xla=True)
    step, result = trained(Net(extra))
    for ours, theirs in zip(result, plain, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert compiled(step) == expected
    printed = capsys.readouterr().err
    assert ("XLA cannot compile all of step 'step'" in printed) == bool(said)
    assert all(f"the forward pass of stage 0: {words}" in printed for words in said)
    # Of what TensorFlow says only the reason, not the line of its sources where it was found.
    assert len(printed.splitlines()) == len(said)
