"""Manual placement: `with smp.partition(i):` around layer construction or inside `call()`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from smp_tf.job.at_shutdown import on_shutdown
from smp_tf.keras.layer_patches import construction_patch
from smp_tf.keras.placed_layers import placed_on
from smp_tf.variables.model_context import step_being_traced


@contextlib.contextmanager
def partition(index: int) -> Iterator[None]:
    """Places the layers called (or constructed) within this context, and ops made in `call`, on one partition.

    Args:
        index: the partition, from 0. The innermost context wins.

    Yields:
        Nothing.

    Raises:
        TypeError: the index is not a whole number.
        ValueError: the index is negative.

    Example:
        >>> class Net(smp.DistributedModel):
        ...     def call(self, x):
        ...         with smp.partition(0):
        ...             x = self.first(x)
        ...         with smp.partition(1):
        ...             return self.second(x)
    """
    if isinstance(index, bool) or not isinstance(index, int):
        raise TypeError(f"A partition is a whole number. Received: {index!r} (of type {type(index).__name__})")
    if index < 0:
        raise ValueError(f"Partitions are numbered from 0. Received: {index}")
    _notice_constructions()
    with placed_on(index), _noted_in_trace(index):
        yield


def _noted_in_trace(index: int) -> contextlib.AbstractContextManager[None]:
    """Counts ops that a model makes itself within its context as those of a block on the partition, like a layer."""
    recorder = getattr(step_being_traced(), "recorder", None)
    if recorder is None or not recorder.in_call or recorder.in_nested_graph:
        return contextlib.nullcontext()
    block: contextlib.AbstractContextManager[None] = recorder.call(f"partition_{index}", "smp.partition", index)
    return block


def _notice_constructions() -> None:
    if construction_patch.install():
        on_shutdown(construction_patch.remove)
