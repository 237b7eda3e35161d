"""Changes what Keras's `apply_gradients` does where other ranks apply gradients of other variables.

A rank leaves out what it does not update. The rest of a call is one of four cases:

    case            what other ranks need of this one                    what is called here
    SCALES          whether its gradients are finite                     the optimizer, or what only counts the step
    NOTHING         as below, though this rank has nothing to apply      what only counts the step, or a stand-in
    LOOKS_AT_ALL    its part of what is computed of all gradients        the optimizer, which gets it of all ranks
    ALONE           nothing                                              the optimizer
"""

from __future__ import annotations

import contextlib
import enum
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from smp_tf import tf_internals
from smp_tf.checkpoint import pending
from smp_tf.errors import StepError
from smp_tf.gradients import joined_gradients, norms
from smp_tf.gradients.applied_gradients import require_applicable
from smp_tf.job import runtime
from smp_tf.keras import adapter
from smp_tf.keras.optimizer_methods import OWN_APPLY, has_own_apply, is_of_keras
from smp_tf.keras.optimizer_trials import is_on_trial
from smp_tf.optimizer import own_apply, recorded_apply
from smp_tf.optimizer.agreement import require_equal_optimizers
from smp_tf.optimizer.updates import applying, few_at_once, is_split
from smp_tf.partition.spread import EVERYWHERE
from smp_tf.replicas import unaveraged
from smp_tf.replicas.gradient_marks import computed
from smp_tf.sharding import gather, layouts, moved_slots, row_blocks, shares
from smp_tf.variables import assigned_values, store
from smp_tf.variables.host_offload import are_updates_offloaded, uncompiled, update_on_host


def stored_here(variable: Any) -> bool:
    """Returns whether this rank has a variable, of a model or of the script."""
    return not store.is_remote(variable)


def updated_here(variable: Any, optimizer: Any) -> bool:
    """Returns whether this rank has a variable and its replica updates it."""
    is_here = not _is_stand_in(variable) and stored_here(variable)
    return is_here and layouts.slots_of(variable, optimizer).is_at(layouts.here())


def are_of_models(wanted: Iterable[Any]) -> bool:
    """Returns whether a distributed model has one of the variables."""
    return any(store.store_of(variable) is not None for variable in wanted)


def is_divided(running: runtime.Runtime) -> bool:
    """Returns whether ranks apply gradients of different variables."""
    return running.topology.stages > 1 or layouts.are_shared()


class _InForce(threading.local):
    """What an optimizer is called within, since another one may wrap it, or call its base class."""

    #: Whether an optimizer that another one wraps is given gradients for only some of the list's variables.
    is_wrapped: bool = False
    #: Whether gradients are being applied.
    is_inside: bool = False
    #: The graph in which they are applied.
    graph: Any = None


in_force = _InForce()


@contextlib.contextmanager
def _applying_over_ranks() -> Iterator[None]:
    before, in_force.is_wrapped = in_force.is_wrapped, True
    try:
        yield
    finally:
        in_force.is_wrapped = before


@contextlib.contextmanager
def _whole_apply(optimizer: Any, kept: Sequence[tuple[Any, Any]], stored: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Applies gradients within its context. At its end every replica has the new weights.

    Of an apply within another one it does nothing, but for few updates at once in a branch of the first one's graph, as
    that of a `LossScaleOptimizer`.

    Args:
        optimizer: of Keras, the outermost.
        kept: gradients, or None, and variables that this rank updates.
        stored: those of all replicas.
    """
    graph = tf.compat.v1.get_default_graph()
    if in_force.is_inside:
        with few_at_once(kept) if graph is not in_force.graph else contextlib.nullcontext():
            yield
        return
    is_offloaded = are_updates_offloaded() and are_of_models(variable for _, variable in stored)
    if is_offloaded and tf_internals.is_compiled_by_xla():
        raise StepError(
            "Gradients are applied inside a tf.function with jit_compile=True, and slots are on the host "
            "(optimizer_offload): XLA compiles for one device. Leave jit_compile out of the function that applies "
            "gradients."
        )
    in_force.is_inside, in_force.graph = True, graph
    try:
        with applying(kept), few_at_once(kept), assigned_values.unnoted():
            yield
    finally:
        in_force.is_inside, in_force.graph = False, None
    if not layouts.are_shared():
        return
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
    return in_force.is_wrapped or are_of_models(variable for _, variable in pairs)


class Case(enum.Enum):
    """The kind of call that is left on this rank. The table above says what follows."""

    SCALES = enum.auto()
    NOTHING = enum.auto()
    LOOKS_AT_ALL = enum.auto()
    ALONE = enum.auto()


@dataclass(frozen=True, eq=False)
class Apply:
    """This rank's part of a call of `apply_gradients`.

    Args:
        optimizer: of Keras.
        kept: gradients, or None, and variables that this rank updates, with blocks in place of rows.
        call: the optimizer's own method, which takes such pairs.
        is_spread: whether other ranks apply gradients of other variables of the same list.
        is_empty: whether variables were left out here, and the rest have no gradient.
        is_users: whether the method is one of the script's own.
    """

    optimizer: Any
    kept: Sequence[tuple[Any, Any]]
    call: Callable[[Sequence[tuple[Any, Any]]], Any]
    is_spread: bool
    is_empty: bool
    is_users: bool

    @property
    def case(self) -> Case:
        """Returns what kind of call it is."""
        if adapter.optimizers().scales_losses(self.optimizer):
            return Case.SCALES
        if self.is_empty:
            return Case.NOTHING
        return Case.LOOKS_AT_ALL if self._looks_at_all else Case.ALONE

    def run(self) -> Any:
        """Applies the gradients, and returns the result of the optimizer's method."""
        match self.case:
            case Case.SCALES:
                with _applying_over_ranks() if self.is_spread else contextlib.nullcontext():
                    return _skip_scaled(self.optimizer) if self.is_empty else self.call(self.kept)
            case Case.NOTHING:
                return self._apply_nothing()
            case Case.LOOKS_AT_ALL:
                with norms.counting(self._counted()), self._watched():
                    return self.call(self.kept)
            case Case.ALONE:
                return self.call(self.kept)

    @property
    def _looks_at_all(self) -> bool:
        """Returns whether the optimizer computes something from all gradients, and other ranks have some of them."""
        return self.is_spread and (self.is_users or adapter.optimizers().clips_by_all(self.optimizer))

    def _apply_nothing(self) -> Any:
        """Counts the step, and takes part in what other ranks compute from all gradients."""
        if self.is_spread and self.is_users:
            with norms.counting([True]):
                return self.call(_nothing())
        if self._looks_at_all:
            norms.norm_of_own([])
        return _only_count(self.optimizer)

    def _counted(self) -> list[bool]:
        """Returns for each gradient whether this rank counts it in the norm of all."""
        return [_is_counted(variable, self.optimizer) for gradient, variable in self.kept if gradient is not None]

    def _watched(self) -> contextlib.AbstractContextManager[Any]:
        # Ours puts together over the stages what it joins.
        is_watched = self.is_users and not _averages_itself(self.optimizer)
        return joined_gradients.watching(self.optimizer, self.kept) if is_watched else contextlib.nullcontext()


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
            is_joining = is_users and is_divided(runtime.current())
            if is_joining and own_apply.joins_gradients(
                pairs, lambda given: original(optimizer, given, *args, **kwargs)
            ):
                # What it hands on to Keras's own method is recorded.
                return original(optimizer, pairs, *args, **kwargs)
            return recorder.record(optimizer, pairs, lambda given: apply_gradients(optimizer, given, *args, **kwargs))
        if in_force.is_inside:
            joined_gradients.handed_on()
        stands_in = any(_is_stand_in(variable) for _, variable in pairs)
        stored = [(g, variable) for g, variable in pairs if stored_here(variable) and not stands_in]
        shares.require_rows_as_before(optimizer, [variable for _, variable in stored])
        kept = [pair for pair in stored if updated_here(pair[1], optimizer)]
        if layouts.are_shared():
            kept = row_blocks.pairs_in_place(optimizer, kept)
        _require_sound(optimizer, pairs, stored)
        one = Apply(
            optimizer,
            kept,
            lambda given: original(optimizer, given, *args, **kwargs),
            is_spread=stands_in or _is_spread(pairs),
            is_empty=len(kept) < len(pairs) and all(gradient is None for gradient, _ in kept),
            is_users=is_users,
        )
        waiting = _when_computed(kept) if one.is_spread else contextlib.nullcontext()
        on_host = update_on_host([variable for _, variable in kept])
        with _whole_apply(optimizer, kept, stored), waiting, on_host, uncompiled(optimizer):
            return one.run()

    return apply_gradients


def _require_sound(optimizer: Any, pairs: Sequence[tuple[Any, Any]], stored: Sequence[tuple[Any, Any]]) -> None:
    """Notes that an optimizer is used, and raises an error where it must not apply its arguments.

    Args:
        optimizer: of Keras.
        pairs: gradients, or None, and variables, as they were given.
        stored: the pairs whose variables this rank stores.
    """
    is_models = are_of_models(variable for _, variable in pairs)
    if is_models:
        moved_slots.note_use(optimizer)
    if in_force.is_inside:
        return
    if unaveraged.are_left() or layouts.are_shared():
        require_applicable(optimizer, stored, averages=_averages_itself(optimizer))
    if is_models:
        require_equal_optimizers(optimizer)


def recorded(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the `apply_gradients` of `smp.DistributedOptimizer`, or of what the script puts in its place.

    It compares what replicas have, so it is given all gradients, and itself leaves out what this rank does not update.
    The script's replacement is given those of this stage.
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
            stored = _nothing()
        return original(optimizer, stored, *args, **kwargs)

    return apply_gradients


def unjoined(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Keras's sum over the replicas of a TensorFlow strategy, which does nothing where there is no strategy.

    Keras's sum is one op of all gradients. With it, the first weight would wait for the average of the last one.
    """

    def aggregate_gradients(optimizer: Any, grads_and_vars: Iterable[Any]) -> Any:
        pairs = list(grads_and_vars)
        running = runtime.current_or_none()
        is_ours = running is not None and is_split(running) and are_of_models(variable for _, variable in pairs)
        # The older optimizers take a function that changes gradients.
        usual = adapter.optimizers().usual_aggregator()
        is_usual = is_of_keras(original) and getattr(optimizer, "gradient_aggregator", usual) is usual
        if is_ours and is_usual and not tf.distribute.has_strategy():
            return pairs
        return original(optimizer, pairs)

    return aggregate_gradients


@functools.cache
def _stand_in() -> tf.Variable:
    """Returns what a class of the script's is given where this rank has nothing to apply.

    Other ranks wait for what the class computes from all gradients, such as their norm. Keras's own `apply_gradients`
    leaves this out.
    """
    empty = np.zeros([0], np.float32)
    return store.make_script_variable(initial_value=empty, trainable=False, name="smp_nothing")


def _is_stand_in(variable: Any) -> bool:
    return _stand_in.cache_info().currsize > 0 and variable is _stand_in()


def _nothing() -> list[tuple[Any, Any]]:
    """Returns a gradient and a variable for a rank that has nothing to apply."""
    return [(tf.zeros([0]), _stand_in())]


def _when_computed(pairs: Iterable[tuple[Any, Any]]) -> contextlib.AbstractContextManager[Any]:
    """Returns a context whose ops wait until the tasks of this rank, which make the gradients, have ended.

    Otherwise TensorFlow would compute at the step's begin what an optimizer makes of its slots alone, such as momentum
    times the last change. A whole set of it would be in memory next to the stash. Gradients that are not a step's own,
    such as clipped ones, are waited for.
    """
    if tf.executing_eagerly():
        return contextlib.nullcontext()
    waited_for: dict[int, Any] = {}
    for gradient in (gradient for gradient, _ in pairs if gradient is not None):
        made = computed(gradient)
        if made is not None:
            what: Any = made.ended
        elif isinstance(gradient, tf.IndexedSlices):
            what = gradient.values
        else:
            what = gradient
        waited_for[id(what)] = what
    # One op waits for all. If each of the context's ops did, there would be as many edges as gradients times ops.
    with tf.control_dependencies(list(waited_for.values())):
        all_there = tf.no_op()
    context: contextlib.AbstractContextManager[Any] = tf.control_dependencies([all_there])
    return context


def _averages_itself(optimizer: Any) -> bool:
    """Returns whether an optimizer itself averages over the replicas what steps leave to it, as 1-bit ones do."""
    return bool(getattr(optimizer, "averages_itself", False))


def _is_counted(variable: Any, optimizer: Any) -> bool:
    """Returns whether this rank counts a gradient: its own variable's or, on the first rank, one that all have."""
    if row_blocks.is_block(variable):
        return True
    place = layouts.here()
    if not layouts.are_shared():
        # Then each replica has its own norm, and counts all of it.
        place = {**place, "D": 0}
    slots = layouts.slots_of(variable, optimizer)
    # The gradient of a weight that may be cut, but has no block, is here as a whole.
    return layouts.layout_of(variable).is_first_at(EVERYWHERE if slots.only is None else slots, place)


def _only_count(optimizer: Any) -> Any:
    """Advances the step counter and a scheduled rate, as on all others, where there is nothing to apply."""
    with tf.init_scope():
        iterations = optimizer.iterations  # legacy optimizers make it now
        pending.optimizer_ready(optimizer, built=False)
    adapter.optimizers().follow_schedule(optimizer)
    return iterations.assign_add(1)


def _skip_scaled(optimizer: Any) -> Any:
    """Counts a step of an optimizer that scales losses, which decides with the others whether gradients are applied."""
    wanted = adapter.optimizers().update_loss_scale(optimizer)
    inner = optimizer.inner_optimizer
    if in_force.is_wrapped and has_own_apply(inner):

        def apply_nothing() -> tf.Tensor:
            inner.apply_gradients(_nothing())
            return tf.constant(True)

        def count() -> tf.Tensor:
            _only_count(inner)
            return tf.constant(True)

        return tf.__internal__.smart_cond.smart_cond(wanted, apply_nothing, count)
    if adapter.optimizers().clips_by_all(inner) and in_force.is_wrapped:
        # Ranks that apply gradients then reduce their norm, and every rank takes part in this.
        tf.__internal__.smart_cond.smart_cond(
            wanted, lambda: norms.norm_of_own([]), lambda: tf.constant(0.0, adapter.layers().floatx())
        )
    return _only_count(inner)
