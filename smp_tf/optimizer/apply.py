"""What Keras's `apply_gradients` does where other ranks apply gradients of other variables."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from smp_tf import tf_internals
from smp_tf.checkpoint import pending
from smp_tf.errors import StepError
from smp_tf.gradients import joined_gradients, norms
from smp_tf.gradients.require_averages import require_averages
from smp_tf.job import runtime
from smp_tf.keras import adapter
from smp_tf.keras.optimizer_methods import OWN_APPLY, has_own_apply, is_of_keras
from smp_tf.keras.optimizer_trials import is_on_trial
from smp_tf.optimizer import recorded_apply
from smp_tf.optimizer.agreement import require_equal_optimizers
from smp_tf.optimizer.few_updates import few_at_once
from smp_tf.optimizer.marks import applying, is_split
from smp_tf.partition.spread import EVERYWHERE, is_first_at
from smp_tf.replicas.gradient_marks import computed
from smp_tf.replicas.unaveraged import require_fit
from smp_tf.sharding import gather, layouts, moved_slots, row_blocks, shares
from smp_tf.variables import assigned_values
from smp_tf.variables import store as variables
from smp_tf.variables.host_offload import are_updates_offloaded, uncompiled, update_on_host


def stored_here(variable: Any) -> bool:
    """Returns whether this rank has a variable, of a model or of the script."""
    return not variables.is_remote(variable)


def updated_here(variable: Any, optimizer: Any) -> bool:
    """Returns whether this rank has a variable and its replica updates it."""
    is_here = not _is_stand_in(variable) and stored_here(variable)
    return is_here and layouts.slots_of(variable, optimizer).is_at(layouts.here())


def are_of_models(wanted: Iterable[Any]) -> bool:
    """Returns whether a distributed model has one of the variables."""
    return any(variables.store_of(variable) is not None for variable in wanted)


def is_divided(running: runtime.Runtime) -> bool:
    """Returns whether ranks apply gradients of different variables."""
    return running.topology.stages > 1 or layouts.are_shared()


class _Spread(threading.local):
    """Whether an optimizer that another one wraps is given gradients that are spread over ranks."""

    wrapped: bool = False
    #: Whether gradients are being applied: an optimizer may wrap another one, or call its base class.
    inside: bool = False
    #: In which graph.
    graph: Any = None


spread = _Spread()


@contextlib.contextmanager
def _applying_over_ranks() -> Iterator[None]:
    before, spread.wrapped = spread.wrapped, True
    try:
        yield
    finally:
        spread.wrapped = before


@contextlib.contextmanager
def _whole_apply(optimizer: Any, kept: Sequence[tuple[Any, Any]], stored: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Applies gradients within its context, at the end of which every replica has the new weights.

    Of an apply within another one it does nothing, but for few updates at once in a branch of the first one's graph, as
    that of a `LossScaleOptimizer`.

    Args:
        optimizer: of Keras, the outermost.
        kept: gradients, or None, and variables that this rank updates.
        stored: those of all replicas.
    """
    graph = tf.compat.v1.get_default_graph()
    if spread.inside:
        with few_at_once(kept) if graph is not spread.graph else contextlib.nullcontext():
            yield
        return
    is_offloaded = are_updates_offloaded() and are_of_models(variable for _, variable in stored)
    if is_offloaded and tf_internals.is_compiled_by_xla():
        raise StepError(
            "Gradients are applied inside a tf.function with jit_compile=True, and slots are on the host "
            "(optimizer_offload): XLA compiles for one device. Leave jit_compile out of the function that applies "
            "gradients."
        )
    spread.inside, spread.graph = True, graph
    try:
        with applying(kept), few_at_once(kept), assigned_values.unnoted():
            yield
    finally:
        spread.inside, spread.graph = False, None
    with assigned_values.unnoted():
        gather.gather(optimizer, (variable for _, variable in stored))
    if not tf.executing_eagerly():
        # Slots were made from them while this was traced.
        with tf.init_scope():
            row_blocks.empty(variable for _, variable in kept)


def _is_spread(pairs: Iterable[Any]) -> bool:
    """Returns whether other ranks apply gradients of other variables of the same list."""
    running = runtime.current_or_none()
    if running is None or not is_divided(running):
        return False
    return spread.wrapped or are_of_models(variable for _, variable in pairs)


def filtered_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an optimizer's `apply_gradients` that leaves out what this rank does not update; see `OptimizerPatch`."""
    is_users = not is_of_keras(original)

    def apply_gradients(optimizer: Any, grads_and_vars: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        if is_on_trial(optimizer):
            return original(optimizer, pairs, *args, **kwargs)
        adapter.optimizers().begin_step(optimizer)
        recorder = recorded_apply.recorder()
        if recorder is not None:
            return recorder.record(optimizer, pairs, lambda given: apply_gradients(optimizer, given, *args, **kwargs))
        if spread.inside:
            joined_gradients.handed_on()
        stands_in = any(_is_stand_in(variable) for _, variable in pairs)
        stored = [(g, variable) for g, variable in pairs if stored_here(variable) and not stands_in]
        shares.require_rows_as_before(optimizer, [variable for _, variable in stored])
        kept = row_blocks.pairs_in_place(optimizer, [pair for pair in stored if updated_here(pair[1], optimizer)])
        is_spread = stands_in or _is_spread(pairs)
        if are_of_models(variable for _, variable in pairs):
            moved_slots.note_use(optimizer)
        if not spread.inside:
            require_fit(optimizer, stored, _averages_itself(optimizer))
            require_averages(stored)
            if are_of_models(variable for _, variable in pairs):
                require_equal_optimizers(optimizer)
        nothing = len(kept) < len(pairs) and all(gradient is None for gradient, _ in kept)
        waiting = _when_computed(kept) if is_spread else contextlib.nullcontext()
        on_host = update_on_host([variable for _, variable in kept])
        with _whole_apply(optimizer, kept, stored), waiting, on_host, uncompiled(optimizer):
            return apply_kept(optimizer, kept, is_spread, nothing, args, kwargs)

    def apply_kept(
        optimizer: Any, kept: list[Any], is_spread: bool, nothing: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if adapter.optimizers().scales_losses(optimizer):
            with _applying_over_ranks() if is_spread else contextlib.nullcontext():
                return _skip_scaled(optimizer) if nothing else original(optimizer, kept, *args, **kwargs)
        clips = is_spread and adapter.optimizers().clips_by_all(optimizer)
        if nothing and is_spread and is_users:
            with norms.counting([True]):
                return original(optimizer, [(tf.zeros([0]), _stand_in())], *args, **kwargs)
        if nothing:
            if clips:
                norms.norm_of_own([])
            return _only_count(optimizer)
        if not clips and not (is_spread and is_users):
            return original(optimizer, kept, *args, **kwargs)
        # Ours puts together over the stages what it joins.
        is_looked_at = is_users and not _averages_itself(optimizer)
        watched = joined_gradients.watching(optimizer, kept) if is_looked_at else contextlib.nullcontext()
        counted = [_is_counted(variable, optimizer) for gradient, variable in kept if gradient is not None]
        with norms.counting(counted), watched:
            return original(optimizer, kept, *args, **kwargs)

    return apply_gradients


def recorded(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the `apply_gradients` of `smp.DistributedOptimizer`, and what the script puts in its place.

    It compares what replicas have, so it is given all gradients, and leaves out itself what this rank does not update.
    What the script puts in its place is given those of this stage.
    """

    def apply_gradients(optimizer: Any, grads_and_vars: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        recorder = recorded_apply.recorder()
        if recorder is not None:
            return recorder.record(optimizer, pairs, lambda given: apply_gradients(optimizer, given, *args, **kwargs))
        held = vars(optimizer)
        if held.get("apply_gradients") is held[OWN_APPLY] or any(_is_stand_in(variable) for _, variable in pairs):
            return original(optimizer, pairs, *args, **kwargs)
        stored = [pair for pair in pairs if stored_here(pair[1])]
        if pairs and not stored:
            stored = [(tf.zeros([0]), _stand_in())]
        return original(optimizer, stored, *args, **kwargs)

    return apply_gradients


def unjoined(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Keras's sum over the replicas of a strategy of TensorFlow's, left out where there is none.

    It makes one op of all gradients, so that the first weight would wait for the average of the last one.
    """

    def aggregate_gradients(optimizer: Any, grads_and_vars: Iterable[Any]) -> Any:
        pairs = list(grads_and_vars)
        running = runtime.current_or_none()
        is_ours = running is not None and is_split(running) and are_of_models(variable for _, variable in pairs)
        # The older ones take a function that makes something else of gradients.
        usual = adapter.optimizers().usual_aggregator()
        is_usual = is_of_keras(original) and getattr(optimizer, "gradient_aggregator", usual) is usual
        if is_ours and is_usual and not tf.distribute.has_strategy():
            return pairs
        return original(optimizer, pairs)

    return aggregate_gradients


@functools.cache
def _stand_in() -> tf.Variable:
    """Returns what a class of the script's is given where this rank has nothing to apply.

    What the class computes of all gradients, such as their norm, other ranks wait for. Keras's own `apply_gradients`
    leaves this out.
    """
    empty = np.zeros([0], np.float32)
    return variables.make_script_variable(initial_value=empty, trainable=False, name="smp_nothing")


def _is_stand_in(variable: Any) -> bool:
    return _stand_in.cache_info().currsize > 0 and variable is _stand_in()


def _when_computed(pairs: Iterable[tuple[Any, Any]]) -> contextlib.AbstractContextManager[Any]:
    """Returns a context whose ops wait until the tasks of this rank have ended, of which the gradients come.

    What an optimizer makes of its slots alone, such as momentum times the last change, TensorFlow would make at the
    step's begin otherwise, and a set of it would lie there next to the stash. Gradients that are no step's own, such as
    clipped ones, are waited for.
    """
    if tf.executing_eagerly():
        return contextlib.nullcontext()
    waited_for: dict[int, Any] = {}
    for gradient in (gradient for gradient, _ in pairs if gradient is not None):
        made = computed(gradient)
        if made is not None:
            what: Any = made.behind
        elif isinstance(gradient, tf.IndexedSlices):
            what = gradient.values
        else:
            what = gradient
        waited_for[id(what)] = what
    # One op that waits for all: were each of the context's to, there would be as many edges as gradients times ops.
    with tf.control_dependencies(list(waited_for.values())):
        all_there = tf.no_op()
    context: contextlib.AbstractContextManager[Any] = tf.control_dependencies([all_there])
    return context


def _averages_itself(optimizer: Any) -> bool:
    """Returns whether an optimizer averages over the replicas what steps leave to it, as those of one bit do."""
    return bool(getattr(optimizer, "averages_itself", False))


def _is_counted(variable: Any, optimizer: Any) -> bool:
    """Returns whether this rank counts a gradient: that of its own variable; of one that all have, the first does."""
    if row_blocks.is_block(variable):
        return True
    place = layouts.here()
    if variables.store_of(variable) is None and place["P"] != 0:
        return False
    if not layouts.are_shared():
        # Each replica has a norm of its own then, and counts all of it.
        place = {**place, "D": 0}
    slots = layouts.slots_of(variable, optimizer)
    # Of one that may be cut, and has no block, the gradient is here as a whole.
    return is_first_at(EVERYWHERE if slots.only is None else slots, place)


def _only_count(optimizer: Any) -> Any:
    """Moves the step counter and a scheduled rate, as on all others, where there is nothing to apply."""
    with tf.init_scope():
        iterations = optimizer.iterations  # legacy optimizers make it now
        pending.optimizer_ready(optimizer, built=False)
    adapter.optimizers().follow_schedule(optimizer)
    return iterations.assign_add(1)


def _skip_scaled(optimizer: Any) -> Any:
    """Returns the same for one that scales losses: with the others it decides whether gradients are applied."""
    wanted = adapter.optimizers().update_loss_scale(optimizer)
    inner = optimizer.inner_optimizer
    if spread.wrapped and has_own_apply(inner):

        def apply_nothing() -> tf.Tensor:
            inner.apply_gradients([(tf.zeros([0]), _stand_in())])
            return tf.constant(True)

        def count() -> tf.Tensor:
            _only_count(inner)
            return tf.constant(True)

        return tf.__internal__.smart_cond.smart_cond(wanted, apply_nothing, count)
    if adapter.optimizers().clips_by_all(inner) and spread.wrapped:
        # Those that apply gradients then reduce their norm, which every rank takes part in.
        tf.__internal__.smart_cond.smart_cond(
            wanted, lambda: norms.norm_of_own([]), lambda: tf.constant(0.0, adapter.layers().floatx())
        )
    return _only_count(inner)
