"""Mistakes in a script give an error that says the rule, what was received and what to do."""

from __future__ import annotations

import pytest

from tests.distributed.conftest import LaunchedCase
from tests.distributed.harness import Case, CaseResult, launch_script

CASES = "tests.distributed.cases.bad_input"

# Per mistake: a built-in error it can be caught as, and what the message must say.
MISTAKES: dict[str, tuple[str, tuple[str, ...]]] = {
    "first_batch_too_small": ("ValueError", ("step 'train' has 3 samples, fewer than the 4 microbatches",)),
    "more_partitions_than_layers": (
        "ValueError",
        ("The model has 1 unit that can be put on different partitions", "the largest possible is 1"),
    ),
    "partitions_do_not_divide_the_world": ("ValueError", ("3 does not divide 2", "it can be 1, 2;")),
    "model_called_outside_a_step": ("ValueError", ("was called outside a step", "decorated with @smp.step")),
    "step_that_ignores_the_model": (
        "ValueError",
        ("Nothing that step 'step' returns or updates depends on the model",),
    ),
    "step_without_a_model": ("ValueError", ("Step 'step' calls no distributed model",)),
    "step_that_returns_nothing": ("ValueError", ("Nothing that step 'step' returns or updates depends on the model",)),
    "argument_that_cannot_be_split": ("ValueError", ("'x' has 2 axes, so it cannot be cut along axis 2",)),
    "scalar_argument": ("ValueError", ("'scale' is a scalar", "@smp.step(non_split_inputs=['scale'])")),
    "arguments_of_different_batch_size": ("ValueError", ("the same number of samples: 'x' has 16, 'y' has 12",)),
    "tape_outside_the_step": (
        "ValueError",
        ("Step 'step' was called under a tf.GradientTape", "open the tape inside the step function"),
    ),
    "unknown_key": ("ValueError", ("'partitons' in smp.init is not a key. Did you mean 'partitions'?",)),
    "wrong_type": ("ValueError", ("'microbatches' in smp.init must be an int of at least 1; this is str 'four'",)),
    "not_initialised": ("RuntimeError", ("smp_tf is not initialised. Call smp.init() first",)),
}


def launched_cases() -> list[object]:
    return [pytest.param(name, LaunchedCase(2, CASES, Case(name, name, {}, None)), id=name) for name in MISTAKES]


@pytest.mark.parametrize(("mistake", "launched"), launched_cases())
def test_a_mistake_gets_a_clear_error_on_every_rank(mistake: str, case_result: CaseResult) -> None:
    base, words = MISTAKES[mistake]
    for error in case_result.values():
        assert error["type"] is not None, "no error was raised"
        assert base in error["bases"], error
        assert all(word in error["words"] for word in words), error["words"]


# tests/smp_tf/test_public_names.py and tests/smdistributed/test_alias.py import TensorFlow first, too.
@pytest.mark.full
def test_keras_3_in_place_of_tf_keras_is_named() -> None:
    outcome = launch_script(
        1,
        "tests/distributed/scripts/tensorflow_first.py",
        environment={"TF_USE_LEGACY_KERAS": "0"},
        launched=False,
    )
    assert outcome.exit_codes == [1], outcome.report()
    assert "TF_USE_LEGACY_KERAS=1" in outcome.output(0), outcome.report()
    assert "Keras 3" in outcome.output(0), outcome.report()


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"])
def test_n_worlds_of_one_are_noticed(variable: str) -> None:
    outcome = launch_script(
        1,
        "tests/distributed/scripts/tensorflow_first.py",
        environment={variable: "2"},
        launched=False,
    )
    assert outcome.exit_codes == [1], outcome.report()
    assert f"started 2 processes ({variable}=2), but Horovod sees only this one" in outcome.output(0), outcome.report()
