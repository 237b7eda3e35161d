"""Computes the norm of all gradients, and clips by it, when each rank has the gradients of its own stage.

On every rank, a list of gradients has one entry per variable. Entries of other stages are None and, with shared slots,
those of other shares, too. Each rank squares what it has. Where replicas share slots, the squares of each stage are
combined over them. Then the squares of all stages are combined entry by entry, and every rank gets the same norm:

    stage 0:  [ 4.0   -     -    0.5 ]
    stage 1:  [  -   2.0   1.0   0.5 ]      an entry that several ranks have (a script's own variable) counts once
              ────────────────────────
               4.0 + 2.0 + 1.0 + 0.5   ──▶ sqrt
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from smp_tf import tf_internals
from smp_tf.batch.output import StepOutput
from smp_tf.collectives.interface import order
from smp_tf.errors import StepError
from smp_tf.gradients import joined_gradients
from smp_tf.gradients.stage_reduction import StageReduction, over_stages
from smp_tf.job import runtime
from smp_tf.keras import adapter
from smp_tf.pipeline.programs.kinds import SUM
from smp_tf.pipeline.task import Task
from smp_tf.replicas.gradient_marks import comes_from_a_step
from smp_tf.replicas.sums import exchange_of, sum_over_replicas
from smp_tf.sharding import layouts

#: Stands for an entry that a rank does not have, since a square is never negative.
_ABSENT = -1.0
#: How much the squares of one gradient may differ between ranks that all have it.
_TOLERANCE = 1e-3


def _chosen(rows: tf.Tensor) -> tf.Tensor:
    """Returns what is known of each entry, from the first rank that has it; `_ABSENT` where none does.

    Args:
        rows: half the square of each entry, by rank; `_ABSENT` where a rank does not have it.
    """
    absent = tf.fill(tf.shape(rows), tf.constant(_ABSENT, tf.float64))
    present = tf.not_equal(rows, absent)
    first = tf.logical_and(present, tf.equal(tf.cumsum(tf.cast(present, tf.int32), axis=0), 1))
    is_known = tf.reduce_any(present, axis=0)
    chosen = tf.reduce_sum(tf.where(first, rows, tf.zeros_like(rows)), axis=0)
    away = tf.abs(tf.where(present, rows - chosen, tf.zeros_like(rows)))
    largest = tf.reduce_max(tf.where(present, rows, absent), axis=0)
    differ = tf.logical_and(tf.math.is_finite(largest), tf.reduce_max(away, axis=0) > _TOLERANCE * largest)
    check = tf.debugging.Assert(
        tf.logical_not(tf.reduce_any(tf.logical_and(differ, is_known))),
        [
            "smp_tf: the norm of all gradients was asked for a list in which one entry stands for different gradients "
            "on different ranks. Pass the gradients in the same order on every rank, with None left in, not zeros, for "
            "those that another rank has: one of another stage, or with shard_optimizer_state another replica. Entries "
            "that differ:",
            tf.where(differ)[:, 0],
        ],
    )
    with tf.control_dependencies([check] if check is not None else []):
        return tf.where(is_known, chosen, absent[0])


def _by_entry(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the sum over the entries. Each is taken from the first stage that has it."""
    chosen = _chosen(tf.stack(parts))
    is_known = tf.not_equal(chosen, tf.constant(_ABSENT, tf.float64))
    return tf.reshape(tf.reduce_sum(tf.where(is_known, chosen, tf.zeros_like(chosen))), [1])


def _of_all_shares(squares: tf.Tensor) -> tf.Tensor:
    """Returns what the replicas of a stage have, entry by entry. Each has its share, or all have the same."""
    if not layouts.are_shared():
        return squares
    exchange = exchange_of(layouts.count(), f"smp_norm_{_NORM_BY_ENTRY.code}", [order().handle])
    return _chosen(exchange.allgather(squares[tf.newaxis]))


_NORM_BY_ENTRY = StageReduction(1, "the norm of all gradients", _by_entry)


def _sum(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.reduce_sum(tf.stack(parts), axis=0)


_NORM_OF_OWN = StageReduction(2, "the norm that an optimizer clips by", _sum)
_NOT_FINITE = StageReduction(3, "the check for gradients that are not finite", _sum)


def _over_optimizers(own: tf.Tensor, reduction: StageReduction) -> tf.Tensor:
    """Sums the values of optimizers that apply parts of the same gradients, over all stages and all shares."""
    if layouts.are_shared():
        with tf.name_scope(str(Task(SUM, runtime.current().topology.stage))):
            [own] = sum_over_replicas([own], f"smp_norm_{reduction.code}", handles=[order().handle])
    return over_stages(own, reduction)


def global_norm(gradients: Sequence[Any]) -> tf.Tensor:
    """Returns the norm of all gradients together, over all stages of the replica.

    Every rank of the replica (with shard_optimizer_state, of all replicas) must call it outside the step, with a list
    in the same order.

    Args:
        gradients: one entry per variable. It is a dense tensor of floats, or `tf.IndexedSlices`: their values are
            squared as they are, as in TensorFlow. Of a gradient that a step returned, the average is taken. None stands
            for a gradient that another rank has, or that does not exist.

    Returns:
        A scalar, the same on every rank: sqrt(sum of all squares), or 0 where there is none. Its type is the widest
        among this rank's gradients. Half and bfloat16 are squared as float32, and the result is then float32.

    Raises:
        TypeError: what is given is not a list or tuple.

    Example:
        >>> gradients, loss = forward_backward(images, labels)
        >>> norm = smp.global_norm([g.accumulate() for g in gradients])
    """
    entries = _entries(gradients)
    squares = [tf.constant(_ABSENT, tf.float64) if e is None else _half_square(e) for e in entries]
    if not squares:
        return tf.constant(0.0, _result_type(entries))
    return _norm(over_stages(_of_all_shares(tf.stack(squares)), _NORM_BY_ENTRY), entries)


def clip_by_global_norm(gradients: Sequence[Any], clip_norm: Any, use_norm: Any = None) -> tuple[list[Any], tf.Tensor]:
    """Scales all gradients so that the norm of all of them, over all stages, is at most a given one.

    It works like `tf.clip_by_global_norm`. Every rank of the replica (with shard_optimizer_state, of all replicas) must
    call it outside the step, with a list in the same order.

    Args:
        gradients: one entry per variable: a tensor, `tf.IndexedSlices`, a gradient that a step returned, or None.
        clip_norm: the largest norm that is left as it is, a float or a float scalar tensor.
        use_norm: the norm, if it is known; by default `smp.global_norm(gradients)`.

    Returns:
        The gradients, each times clip_norm / max(norm, clip_norm), and the norm before. A gradient that is None stays
        None. A norm that is infinite or not a number makes all gradients NaN.

    Raises:
        TypeError: what is given is not a list or tuple.

    Example:
        >>> gradients, loss = forward_backward(images, labels)
        >>> clipped, norm = smp.clip_by_global_norm([g.accumulate() for g in gradients], 1.0)
        >>> _ = optimizer.apply_gradients(zip(clipped, model.trainable_variables))
    """
    entries = _entries(gradients)
    norm = global_norm(entries) if use_norm is None else tf.convert_to_tensor(use_norm)
    clipped, _ = tf.clip_by_global_norm(entries, tf.cast(clip_norm, norm.dtype), use_norm=norm)
    return clipped, norm


def all_finite(here: tf.Tensor) -> tf.Tensor:
    """Returns whether all gradients of all stages are finite. Every rank must call it.

    Args:
        here: whether the gradients that this rank applies are finite, a bool scalar.

    Returns:
        A bool scalar, the same on every rank.
    """
    not_finite = tf.reshape(tf.cast(tf.logical_not(here), tf.float64), [1])
    return _over_optimizers(not_finite, _NOT_FINITE)[0] < 0.5


def norm_of_own(gradients: Sequence[Any]) -> tf.Tensor:
    """Returns the norm over all stages of gradients that no two ranks give. Every rank must call it.

    Args:
        gradients: the gradients that this rank counts, without None. The list may be empty.
    """
    own = tf.add_n([_half_square(g) for g in gradients]) if gradients else tf.constant(0.0, tf.float64)
    return _norm(_over_optimizers(tf.reshape(own, [1]), _NORM_OF_OWN), gradients)


def _entries(gradients: Sequence[Any]) -> list[Any]:
    if not isinstance(gradients, Sequence) or isinstance(gradients, str):
        raise TypeError(f"Gradients are given as a list or a tuple. Received: {type(gradients).__name__}")
    found = [g.accumulate() if isinstance(g, StepOutput) else g for g in gradients]
    return [g if g is None or isinstance(g, tf.IndexedSlices) else tf.convert_to_tensor(g) for g in found]


def _half_square(gradient: Any) -> tf.Tensor:
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else tf.convert_to_tensor(gradient)
    if values.dtype.size < 4:
        values = tf.cast(values, tf.float32)
    return tf.cast(tf.nn.l2_loss(values), tf.float64)


def _norm(half_square: tf.Tensor, gradients: Sequence[Any]) -> tf.Tensor:
    return tf.cast(tf.sqrt(2.0 * half_square[0]), _result_type(gradients))


def _result_type(gradients: Sequence[Any]) -> tf.DType:
    types = {g.dtype for g in gradients if g is not None} or {tf.as_dtype(adapter.layers().floatx())}
    return tf.float64 if tf.float64 in types else tf.float32


class _Counted(threading.local):
    """Which gradients of an optimizer's clipping count as this rank's; None outside `counting`."""

    entries: Sequence[bool] | None = None


_counted = _Counted()


@contextlib.contextmanager
def counting(entries: Sequence[bool]) -> Iterator[None]:
    """Makes `tf.linalg.global_norm`, over as many gradients, the norm over all stages within its context.

    Args:
        entries: for each gradient that is not None, whether this rank counts it. One rank counts a gradient that all
            ranks have.
    """
    before, _counted.entries = _counted.entries, entries
    try:
        yield
    finally:
        _counted.entries = before


class NormPatch:
    """Makes `tf.linalg.global_norm`, and so `tf.clip_by_global_norm`, see all stages for lists of a step's gradients.

    For lists of other tensors, and for calls within a step, where all gradients are seen, TensorFlow's own function
    runs.

    Args:
        in_step: returns whether a step is being traced.
    """

    def __init__(self, in_step: Callable[[], bool]) -> None:
        self._in_step = in_step
        self._original: Callable[..., Any] | None = None

    def install(self) -> bool:
        """Puts our function in place. A second call changes nothing.

        Returns:
            Whether it was not in place before.
        """
        if self._original is not None:
            return False
        self._original = tf_internals.replace_global_norm(self._global_norm)
        return True

    def remove(self) -> None:
        """Puts TensorFlow's own function back."""
        if self._original is not None:
            tf_internals.replace_global_norm(self._original)
            self._original = None

    def _global_norm(self, t_list: Any, name: str | None = None) -> Any:
        assert self._original is not None
        given = [t for t in t_list if t is not None] if isinstance(t_list, (list, tuple)) else []
        if _counted.entries is not None:
            if len(given) != len(_counted.entries):
                raise StepError(
                    f"An optimizer computes the norm of {len(given)} gradients, and was given {len(_counted.entries)} "
                    f"on this rank. Gradients are spread over the ranks, and a norm is one of all of them: compute it "
                    f"of all gradients that apply_gradients is given, once; tf.clip_by_norm clips one by its own."
                )
            own = [t for t, counts in zip(given, _counted.entries, strict=True) if counts]
            with joined_gradients.allowed():
                return tf.cast(norm_of_own(own), _result_type(given))
        if not self._in_step() and _is_spread(t_list):
            return global_norm(t_list)
        with joined_gradients.allowed():
            return self._original(t_list, name)


def _is_spread(t_list: Any) -> bool:
    """Returns whether a list holds gradients of a step. Other ranks may have some of these."""
    running = runtime.current_or_none()
    if running is None or (running.topology.stages == 1 and not layouts.are_shared()):
        return False
    if not isinstance(t_list, (list, tuple)):
        return False
    tensors = [t for t in t_list if t is not None]
    if any(comes_from_a_step(t) for t in tensors):
        return True
    # A result that was made eagerly from a gradient bears no mark. But None, for gradients of other ranks, is a sign.
    return len(tensors) < len(t_list) and all(_is_eager(t) for t in tensors)


def _is_eager(value: Any) -> bool:
    return hasattr(value.values if isinstance(value, tf.IndexedSlices) else value, "numpy")
