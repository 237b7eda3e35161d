"""Decides how a step cuts its batches: each argument along an axis, and all into a number of microbatches."""

from __future__ import annotations

from smp_tf.batch.arguments import Arguments
from smp_tf.batch.cut_batch import CutBatch
from smp_tf.batch.microbatches import SplitArgument, plan_arguments, sizes_of, static_batch_size, with_pieces
from smp_tf.errors import StepError
from smp_tf.job import runtime
from smp_tf.steps.options import StepOptions


def cut_arguments(arguments: Arguments, options: StepOptions) -> tuple[SplitArgument, ...]:
    """Returns the axis along which each tensor argument of a step is cut.

    Args:
        arguments: arguments of a call.
        options: options of the step.
    """
    return plan_arguments(
        arguments.names,
        arguments.roots,
        arguments.specs,
        options.non_split,
        options.axes,
        of_keras=options.of_keras,
    )


def cut_batch(step: str, arguments: Arguments, options: StepOptions, *, is_first: bool) -> CutBatch:
    """Returns how the batches of a signature are cut.

    Args:
        step: name of the step, for messages.
        arguments: arguments of a call of that signature.
        options: options of the step.
        is_first: whether the step has no program yet.

    Raises:
        StepError: the batch is empty, or it is the first one and has too few samples.
    """
    wanted, planned = runtime.current().config.microbatches, cut_arguments(arguments, options)
    batch = static_batch_size(planned, wanted, options.of_keras)
    microbatches = wanted if any(argument.axis is not None for argument in planned) else 1
    if batch is not None and batch < microbatches:
        _require_samples(step, batch, wanted, may_be_small=not is_first or options.small_first_batch)
        microbatches = batch
    sizes = sizes_of(batch, microbatches) if batch is not None else ()
    return CutBatch(with_pieces(planned, microbatches), microbatches, sizes)


def _require_samples(step: str, batch: int, wanted: int, *, may_be_small: bool) -> None:
    if batch == 0:
        raise StepError(f"Step {step!r} was given a batch without samples. Leave empty batches out.")
    if not may_be_small:
        raise StepError(
            f"The first batch of step {step!r} has {batch} samples, fewer than the {wanted} microbatches it is to be "
            f"cut into. Use batches of at least {wanted} samples, or fewer microbatches."
        )
