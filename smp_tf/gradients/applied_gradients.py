"""Requires of gradients that are applied what keeps the weights of all replicas equal.

    gradient_compression "1bit"      each replica has its own: the optimizer averages, or it is an error
    shard_optimizer_state            averages: each replica updates its share by its own gradient, and all take the
                                     result. Without averages weights would be wrong, and nobody would see it: they are
                                     equal on all replicas

A gradient that a step gives to one replica alone is None on the others. So any other value there is not from a step.
For a gradient that all replicas are given, and that bears no mark, all tell each other a hash.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from smp_tf import tf_internals
from smp_tf.collectives.interface import order
from smp_tf.errors import StepError
from smp_tf.job import runtime
from smp_tf.job.content_hash import content_hash
from smp_tf.keras import adapter
from smp_tf.partition.layout import Layout
from smp_tf.partition.spread import EVERYWHERE, Place
from smp_tf.replicas import sums, unaveraged
from smp_tf.replicas.gradient_marks import comes_from_a_step, mark_of
from smp_tf.sharding.layouts import are_shared, here, layout_of
from smp_tf.variables import store

_ADVICE = (
    "Compute gradients of a model's weights in a step, or average them by smp.average_gradients(gradients) on all "
    "replicas before they are applied."
)


def require_applicable(optimizer: Any, pairs: Sequence[tuple[Any, Any]], *, averages: bool) -> None:
    """Raises an error where the gradients that replicas apply are neither averages nor averaged by the optimizer.

    All replicas of a stage call it.

    Args:
        optimizer: the optimizer that is about to apply gradients.
        pairs: gradients, or None, and variables, as given to the optimizer.
        averages: whether the optimizer itself averages over the replicas.

    Raises:
        StepError: there is such a gradient, or the optimizer cannot average where it is called. Zeros stand for None.
        tf.errors.OpError: there is such a gradient, in a function.
    """
    if unaveraged.are_left():
        _require_fit(optimizer, pairs, averages)
    if are_shared():
        _require_averages(pairs)


def _require_fit(optimizer: Any, pairs: Iterable[tuple[Any, Any]], averages: bool) -> None:
    """Requires an optimizer that averages, where each replica has gradients of its own."""
    given = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
    unequal = [v for gradient, v in given if not mark_of(gradient).is_average and _is_of_a_step(gradient, v)]
    if averages and given and tf_internals.is_compiled_by_xla():
        raise StepError(
            "Gradients are applied inside a tf.function with jit_compile=True, and the optimizer averages them over "
            'the replicas ("gradient_compression": "1bit"): XLA cannot compile what passes between these. Leave '
            "jit_compile out of the function that applies gradients; xla=True in the configuration compiles the step."
        )
    if averages or not unequal:
        return
    name = type(optimizer).__name__
    if adapter.optimizers().scales_losses(optimizer):
        raise StepError(
            f'With "gradient_compression": "1bit" each replica has gradients of its own, and {name} would decide on '
            f"each by these alone whether to apply them. Apply them without a loss scale: mixed_bfloat16 needs none. "
            f"Or leave the key out."
        )
    raise StepError(
        f'With "gradient_compression": "1bit" gradients come out of a step as each replica has computed them, and '
        f"smp.OneBitAdam or smp.OneBitLAMB averages over the replicas. {name} does not, and was given that of "
        f'{unequal[0].name!r}. Use one of these two; or leave the key out, or say "bf16" or "fp16".'
    )


def _is_of_a_step(gradient: Any, variable: Any) -> bool:
    """Returns whether a gradient was made from one that a step has returned. That of a model's weight always was."""
    return store.store_of(variable) is not None or comes_from_a_step(gradient)


def _require_averages(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Raises where gradients of a model's weights are no averages; zeros stand for None."""
    place = here()
    found = [(g, v, _wanted(_is_known(g), layout_of(v), place)) for g, v in pairs if g is not None]
    for gradient, variable, wanted in found:
        if wanted is Wanted.NOTHING:
            _require_zeros(gradient, variable)
    of_all = [(gradient, variable) for gradient, variable, wanted in found if wanted is Wanted.EQUAL]
    if of_all:
        _require_the_same(of_all)


class Wanted(enum.Enum):
    """What a gradient must be here."""

    ANYTHING = enum.auto()
    NOTHING = enum.auto()
    """Zeros, as those of another replica are."""
    EQUAL = enum.auto()
    """The same on all replicas."""


def _is_known(gradient: Any) -> bool:
    """Returns whether the mark of a gradient says that it is an average, or was made of a step's gradient."""
    return mark_of(gradient).is_average or comes_from_a_step(gradient)


def _wanted(is_known: bool, layout: Layout, place: Place) -> Wanted:
    """Returns what a gradient must be here.

    Args:
        is_known: whether its mark says where it comes from.
        layout: of the variable that it is applied to.
        place: coordinates of this rank.
    """
    if is_known:
        return Wanted.ANYTHING
    if not layout.receives_gradient(place):
        # No step has given it to this replica.
        return Wanted.NOTHING
    # A step gives it to all, or may: then those who have slots of it must not have made unlike things of it.
    goes_to_all = layout.slots != EVERYWHERE and layout.gradient == EVERYWHERE
    return Wanted.EQUAL if goes_to_all else Wanted.ANYTHING


def _require_zeros(gradient: Any, variable: Any) -> None:
    receiver = layout_of(variable).gradient.only
    words = (
        f"With shard_optimizer_state replica {receiver} alone gets the gradient of {variable.name!r} from a step, and "
        f"updates the weight. Replica {here()['D']} applies one that no step has given it, so it is not averaged over "
        f"the replicas. {_ADVICE}"
    )
    value = gradient.values if isinstance(gradient, tf.IndexedSlices) else tf.convert_to_tensor(gradient)
    is_nothing = tf.logical_not(tf.reduce_any(tf.not_equal(value, 0)))
    if not tf.executing_eagerly():
        tf.debugging.Assert(is_nothing, [f"smp_tf: {words}"])
    elif not is_nothing:
        raise StepError(words)


def _require_the_same(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Requires that what a script has made from averages is the same on all replicas."""
    handles = [] if tf.executing_eagerly() else [order().handle]
    exchange = sums.exchange_of(runtime.current().topology.replicas, "smp_applied", handles)
    heard = exchange.allgather(tf.concat([_hash(gradient) for gradient, _ in pairs], axis=0)[tf.newaxis])
    names = [variable.name for _, variable in pairs]
    differ = tf.reduce_any(tf.not_equal(heard, heard[:1]), axis=0)
    words = (
        "With shard_optimizer_state replicas apply gradients of a model's weights that differ from each other, so they "
        f"are not averaged. {_ADVICE} They are those of"
    )
    if not tf.executing_eagerly():
        found = tf.boolean_mask(tf.constant(names), differ)
        tf.debugging.Assert(tf.logical_not(tf.reduce_any(differ)), [f"smp_tf: {words}", found], summarize=10)
    elif np.any(differ):
        raise StepError(f"{words} {', '.join(name for name, is_other in zip(names, differ, strict=True) if is_other)}.")


def _hash(gradient: Any) -> tf.Tensor:
    """Returns the hash of a dense gradient or of slices, int64[1]."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.bitwise.bitwise_xor(content_hash(gradient.values), content_hash(gradient.indices))
    return content_hash(tf.convert_to_tensor(gradient))
