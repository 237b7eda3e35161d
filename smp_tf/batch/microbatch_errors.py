"""Adds to a shape error within a step that the step sees a microbatch, and not the batch."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence

import tensorflow as tf

from smp_tf.errors import StepError

#: Words of TensorFlow's and Keras's messages about shapes that do not fit.
_OF_SHAPES = re.compile(r"shape|dimension|\bsize\b|\brank\b|elements|broadcast|batch", re.IGNORECASE)


@contextlib.contextmanager
def told_of_microbatches(step: str, sizes: Sequence[int]) -> Iterator[None]:
    """Adds to shape errors, within its context, for how many samples a step is traced.

    Args:
        step: name of the step.
        sizes: number of samples in each microbatch; empty where it is known only when the step runs.
    """
    try:
        yield
    except StepError:
        raise
    except (ValueError, tf.errors.InvalidArgumentError) as error:
        tell_of_microbatches(error, f"Step {step!r} is traced for", sizes)
        raise


def tell_of_microbatches(error: Exception, begin: str, sizes: Sequence[int]) -> None:
    """Adds to an error, if it is a shape error, that a step has a microbatch.

    Args:
        error: the error to change.
        begin: begin of the sentence that is added.
        sizes: number of samples in each microbatch; empty where it is unknown.
    """
    said = str(error)
    if not _OF_SHAPES.search(said):
        return
    part = " or ".join(map(str, dict.fromkeys(sizes)))
    of = f"{part} of the {sum(sizes)} samples" if sizes else "the batch"
    words = (
        f"{said}\n\n{begin} a microbatch of {of}. A model that is made for a fixed number of samples (a reshape, a "
        f"tensor of zeros) needs that of the microbatch: take it from tf.shape(x)[0], or set microbatches to 1."
    )
    if isinstance(error, tf.errors.OpError):
        error._message = words
    elif len(error.args) == 1:
        error.args = (words,)
