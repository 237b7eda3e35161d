"""What smp_tf does to Keras: tag layer calls, and keep optimizers to the variables this rank stores. For tf_keras."""

from __future__ import annotations

import abc
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from smp_tf import (
    gathered_shares,
    manual_placement,
    momentum_product,
    norms,
    pending_restore,
    recorded_apply,
    row_blocks,
    runtime,
    sharded_slots,
    tf_internals,
    variables,
)
from smp_tf.applied_gradients import require_averages
from smp_tf.apply_marks import applying, is_split
from smp_tf.errors import StepError
from smp_tf.few_updates import few_at_once
from smp_tf.gradient_marks import computed
from smp_tf.host_offload import are_slots_on_host, are_updates_offloaded, uncompiled, update_on_host
from smp_tf.one_bit_optimizer import OneBitOptimizer
from smp_tf.optimizer_agreement import require_equal_optimizers
from smp_tf.optimizer_state import is_on_trial
from smp_tf.partition.trace import Recorder
from smp_tf.unaveraged_gradients import require_fit


@contextlib.contextmanager
def tag_layer_calls(
    recorder: Recorder,
    is_model: Callable[[Any], bool],
    around: Callable[[Any], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Iterator[None]:
    """Within this context, every layer called by a distributed model announces its call to the recorder.

    Args:
        recorder: what to announce calls to.
        is_model: whether a layer is a distributed model; calls outside any such model are not announced.
        around: given a layer that is called outside any such model, the context to call it in, which may announce the
            call of the model that the layer is part of.
    """
    original = tf_keras.layers.Layer.__call__

    @functools.wraps(original)
    def tagged(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if not (recorder.in_call or is_model(layer)):
            with around(layer):
                return tagged(layer, *args, **kwargs) if recorder.in_call else original(layer, *args, **kwargs)
        stage = manual_placement.stage_of(layer)
        with recorder.call(layer.name, type(layer).__name__, stage):
            return original(layer, *args, **kwargs)

    tf_keras.layers.Layer.__call__ = tagged
    try:
        yield
    finally:
        tf_keras.layers.Layer.__call__ = original


#: Stands for an attribute that was not there.
_NOTHING = object()


class Patch(abc.ABC):
    """Methods of Keras's classes replaced by ours, from `install` until `remove`."""

    def __init__(self) -> None:
        # By class and name: what stood there, or that nothing did.
        self._originals: list[tuple[Any, str, Any]] = []

    def install(self) -> bool:
        """Put ours in place. Doing it twice is doing it once.

        Returns:
            Whether they were not in place before.
        """
        if self._originals:
            return False
        self._replace()
        return True

    def remove(self) -> None:
        """Put Keras's own back."""
        for owner, name, original in reversed(self._originals):
            if original is _NOTHING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._originals.clear()

    @abc.abstractmethod
    def _replace(self) -> None:
        """Put ours in place, by `_wrap`."""

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        original = owner.__dict__[name]
        self._originals.append((owner, name, original))
        setattr(owner, name, functools.wraps(original)(wrapper(original)))

    def _add(self, owner: type, name: str, value: Any) -> None:
        """Give a class an attribute that Keras's does not define itself."""
        if name not in owner.__dict__:
            self._originals.append((owner, name, _NOTHING))
            setattr(owner, name, value)


class ConstructionPatch(Patch):
    """Makes layers remember under which `smp.partition`, if any, they were constructed."""

    def _replace(self) -> None:
        self._wrap(tf_keras.layers.Layer, "__init__", _noted_construction)


class OptimizerPatch(Patch):
    """Makes optimizers skip what this rank does not store.

    Pairs of a gradient and a variable of another rank are dropped before an optimizer builds its slots, so no slot is
    made for them and no warning is printed; the iteration counter advances all the same. What an optimizer decides by
    all gradients, the norm to clip by and whether they are finite, is reduced over the stages. Where replicas share the
    slots, pairs of other shares are dropped too, and the new weights are gathered. With optimizer_offload slots are
    made, and updates computed, on the host.
    """

    def _replace(self) -> None:
        for name, wrapper in (
            ("build", _filtered_build),
            ("apply_gradients", _filtered_apply),
            ("aggregate_gradients", _unjoined),
            ("_aggregate_gradients", _unjoined),
            ("finalize_variable_values", _filtered_finalize),
            # Called where Keras has put what is made now beside the weight.
            ("_update_step", _updated_on_host),
            ("add_variable_from_reference", _made_on_host),
        ):
            for optimizer in optimizers_defining(name):
                self._wrap(optimizer, name, wrapper)
        # The legacy optimizers have no `build`; this is where they make their slots.
        self._wrap(tf_keras.optimizers.legacy.Optimizer, "_create_all_weights", _reported_weights)
        self._wrap(tf_internals.loss_scaling(), "_is_all_finite", _all_finite_over_stages)


class StatePatch(Patch):
    """Makes metrics, and layers that adapt to data, hold their values from the start.

    A metric's variables belong to the script, on every rank, also where a distributed model makes the metric. A layer
    that adapts runs functions of its own over its variables, while the model is constructed or before its first step.
    """

    def _replace(self) -> None:
        self._wrap(tf_keras.metrics.Metric, "add_weight", _at_once)
        self._wrap(tf_keras.layers.experimental.preprocessing.PreprocessingLayer, "adapt", _adapted)
        # Reads what it has just made.
        self._wrap(tf_keras.layers.Normalization, "build", _at_once)


#: In force from the first `smp.partition` until `smp.shutdown`.
construction_patch = ConstructionPatch()

#: In force from the first distributed model until `smp.shutdown`.
optimizer_patch = OptimizerPatch()

#: In force from the first distributed model until `smp.shutdown`.
state_patch = StatePatch()


def optimizers_defining(method: str) -> list[type]:
    """Every optimizer class, new and legacy, with a definition of its own of a method."""
    found: list[type] = []
    bases = (tf_keras.optimizers.Optimizer, tf_keras.optimizers.legacy.Optimizer)
    stack: list[type] = [c for base in bases for c in base.__mro__ if c.__module__.startswith("tf_keras.")]
    while stack:
        optimizer = stack.pop()
        if method in optimizer.__dict__ and optimizer not in found:
            found.append(optimizer)
        if issubclass(optimizer, bases):
            stack.extend(optimizer.__subclasses__())
    return found


def _noted_construction(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(layer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(layer, *args, **kwargs)
        manual_placement.note_construction(layer)

    return __init__


def _at_once(original: Callable[..., Any]) -> Callable[..., Any]:
    def made(owner: Any, *args: Any, **kwargs: Any) -> Any:
        with variables.made_at_once():
            return original(owner, *args, **kwargs)

    return made


def _adapted(original: Callable[..., Any]) -> Callable[..., Any]:
    def adapt(layer: Any, *args: Any, **kwargs: Any) -> Any:
        for variable in layer.variables:
            store = variables.store_of(variable)
            if store is not None:
                store.fill(variable, runtime.current().seed)
        with variables.made_at_once():
            return original(layer, *args, **kwargs)

    return adapt


def _stored_here(variable: Any) -> bool:
    return not variables.is_remote(variable)


def _updated_here(variable: Any, optimizer: Any) -> bool:
    is_here = not _is_stand_in(variable) and _stored_here(variable)
    return is_here and not sharded_slots.is_updated_elsewhere(variable, optimizer)


def _filtered_build(original: Callable[..., Any]) -> Callable[..., Any]:
    def build(optimizer: Any, var_list: Iterable[Any]) -> Any:
        wanted = list(var_list)
        if is_on_trial(optimizer):
            return original(optimizer, wanted)
        _refuse_what_is_undecided(wanted)
        _require_the_same_shares(optimizer, wanted)
        sharded_slots.require_rows_as_before(optimizer, wanted)
        # A class's `build` calls that of its base first, when not all slots are there.
        outermost = optimizer not in _being_built
        _being_built.add(optimizer)
        kept = row_blocks.in_place(optimizer, [v for v in wanted if _updated_here(v, optimizer)])
        try:
            with update_on_host(kept), _slots_need_no_second_trace(kept):
                # Some look at the first variable.
                result = original(optimizer, kept) if kept or not wanted else None
        finally:
            if outermost:
                _being_built.discard(optimizer)
                if not _spread.inside:
                    row_blocks.empty(kept)
        if outermost:
            momentum_product.begin_step(optimizer)
            pending_restore.optimizer_ready(optimizer, built=bool(kept) or not wanted)
        return result

    return build


_being_built: weakref.WeakSet[Any] = weakref.WeakSet()


def _slots_need_no_second_trace(weights: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Lets a `tf.function` keep the trace in which the slots of distributed models' weights are made.

    Args:
        weights: slots are made for them.
    """
    return tf_internals.kept_trace() if _are_of_models(weights) else contextlib.nullcontext()


def _updated_on_host(original: Callable[..., Any]) -> Callable[..., Any]:
    def _update_step(optimizer: Any, gradient: Any, variable: Any) -> Any:
        with update_on_host([variable]):
            return original(optimizer, gradient, variable)

    return _update_step


def _made_on_host(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_variable_from_reference(optimizer: Any, model_variable: Any, *args: Any, **kwargs: Any) -> Any:
        with update_on_host([model_variable]):
            return original(optimizer, model_variable, *args, **kwargs)

    return add_variable_from_reference


def _reported_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    def _create_all_weights(optimizer: Any, var_list: Iterable[Any]) -> Any:
        wanted = list(var_list)
        if is_on_trial(optimizer):
            return original(optimizer, wanted)
        if are_updates_offloaded() and _are_of_models(wanted):
            name = type(optimizer).__name__
            raise StepError(
                f"optimizer_offload keeps slots on the host, and tf_keras.optimizers.legacy.{name} keeps them beside "
                f"its weights. Use the optimizer of tf_keras.optimizers, or leave optimizer_offload out."
            )
        _require_the_same_shares(optimizer, wanted)
        with _slots_need_no_second_trace(wanted):
            result = original(optimizer, wanted)
        with tf.init_scope():
            pending_restore.optimizer_ready(optimizer)
        return result

    return _create_all_weights


def _require_the_same_shares(optimizer: Any, wanted: Iterable[Any]) -> None:
    """Raise where an optimizer has slots for another share of the variables than this rank updates now."""
    if runtime.current_or_none() is None or not _are_of_models(wanted):
        return
    then = _in_words(sharded_slots.shares_of(optimizer), are_slots_on_host(optimizer))
    now = _in_words(sharded_slots.count(), are_updates_offloaded())
    if then != now:
        raise StepError(
            f"Before smp.shutdown this {type(optimizer).__name__} was used where {then}; now {now}. "
            f"Make a new optimizer. To keep the slots, save them with smp.CheckpointManager before smp.shutdown, and "
            f"restore them into the new one."
        )


def _in_words(shares: int, on_host: bool) -> str:
    words = f"{shares} replicas share slots" if shares > 1 else "every replica has all slots"
    return f"{words} on the host" if on_host else words


def _refuse_what_is_undecided(wanted: Iterable[Any]) -> None:
    """Raise where an optimizer would make slots on every rank, since it is not decided who stores the variables."""
    running = runtime.current_or_none()
    if running is None or not _is_divided(running):
        return
    for variable in wanted:
        store = variables.store_of(variable)
        state = store.state(variable) if store is not None else None
        if state is not None and state.owner is None:
            raise StepError(
                f"An optimizer was to be built for variable {state.name!r} before the first step of its model. Which "
                f"of the {running.topology.size} ranks has slots for the variable is not decided yet, so every rank "
                f"would make them. Build the optimizer after the first step, or not at all: apply_gradients does it."
            )


def _is_divided(running: runtime.Runtime) -> bool:
    """Whether ranks apply gradients of different variables."""
    return running.topology.mp_size > 1 or sharded_slots.are_shared()


def _filtered_finalize(original: Callable[..., Any]) -> Callable[..., Any]:
    def finalize_variable_values(optimizer: Any, var_list: Iterable[Any]) -> Any:
        stored = [v for v in var_list if _stored_here(v)]
        updated = [v for v in stored if _updated_here(v, optimizer)]
        has_averages = getattr(optimizer, "use_ema", False)
        result = original(optimizer, row_blocks.in_place(optimizer, updated) if has_averages else updated)
        if has_averages:
            gathered_shares.gather(optimizer, stored)
        return result

    return finalize_variable_values


class _Spread(threading.local):
    """Whether an optimizer that another one wraps is given gradients that are spread over ranks."""

    wrapped: bool = False
    #: Whether gradients are being applied: an optimizer may wrap another one, or call its base class.
    inside: bool = False
    #: In which graph.
    graph: Any = None


_spread = _Spread()


@contextlib.contextmanager
def _applying_over_ranks() -> Iterator[None]:
    before, _spread.wrapped = _spread.wrapped, True
    try:
        yield
    finally:
        _spread.wrapped = before


@contextlib.contextmanager
def _whole_apply(optimizer: Any, kept: Sequence[tuple[Any, Any]], stored: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """A context in which gradients are applied, at the end of which every replica has the new weights.

    Of an apply within another one it does nothing, but for few updates at once in a branch of the first one's graph, as
    that of a `LossScaleOptimizer`.

    Args:
        optimizer: of Keras, the outermost.
        kept: gradients, or None, and variables that this rank updates.
        stored: those of all replicas.
    """
    graph = tf.compat.v1.get_default_graph()
    if _spread.inside:
        with few_at_once(kept) if graph is not _spread.graph else contextlib.nullcontext():
            yield
        return
    is_offloaded = are_updates_offloaded() and _are_of_models(variable for _, variable in stored)
    if is_offloaded and tf_internals.is_compiled_by_xla():
        raise StepError(
            "Gradients are applied inside a tf.function with jit_compile=True, and slots are on the host "
            "(optimizer_offload): XLA compiles for one device. Leave jit_compile out of the function that applies "
            "gradients."
        )
    _spread.inside, _spread.graph = True, graph
    try:
        with applying(kept), few_at_once(kept):
            yield
    finally:
        _spread.inside, _spread.graph = False, None
    gathered_shares.gather(optimizer, (variable for _, variable in stored))
    if not tf.executing_eagerly():
        # Slots were made from them while this was traced.
        with tf.init_scope():
            row_blocks.empty(variable for _, variable in kept)


def _are_of_models(wanted: Iterable[Any]) -> bool:
    """Whether a distributed model has one of the variables."""
    return any(variables.store_of(variable) is not None for variable in wanted)


def _is_spread(pairs: Iterable[Any]) -> bool:
    """Whether other ranks apply gradients of other variables of the same list."""
    running = runtime.current_or_none()
    if running is None or not _is_divided(running):
        return False
    return _spread.wrapped or _are_of_models(variable for _, variable in pairs)


def _filtered_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    is_users = not _is_of_keras(original)

    def apply_gradients(optimizer: Any, grads_and_vars: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        if is_on_trial(optimizer):
            return original(optimizer, pairs, *args, **kwargs)
        momentum_product.begin_step(optimizer)
        recorder = recorded_apply.recorder()
        if recorder is not None:
            options = dict(zip(("name",), args, strict=False)) | kwargs
            return recorder.record(optimizer, pairs, options)
        stands_in = any(_is_stand_in(variable) for _, variable in pairs)
        stored = [(g, variable) for g, variable in pairs if _stored_here(variable) and not stands_in]
        sharded_slots.require_rows_as_before(optimizer, [variable for _, variable in stored])
        kept = row_blocks.pairs_in_place(optimizer, [pair for pair in stored if _updated_here(pair[1], optimizer)])
        is_spread = stands_in or _is_spread(pairs)
        if not _spread.inside:
            require_fit(optimizer, stored, isinstance(optimizer, OneBitOptimizer))
            require_averages(stored)
            if _are_of_models(variable for _, variable in pairs):
                require_equal_optimizers(optimizer)
        nothing = len(kept) < len(pairs) and all(gradient is None for gradient, _ in kept)
        waiting = _when_computed(kept) if is_spread else contextlib.nullcontext()
        on_host = update_on_host([variable for _, variable in kept])
        with _whole_apply(optimizer, kept, stored), waiting, on_host, uncompiled(optimizer):
            return apply_kept(optimizer, kept, is_spread, nothing, args, kwargs)

    def apply_kept(
        optimizer: Any, kept: list[Any], is_spread: bool, nothing: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if isinstance(optimizer, tf_keras.mixed_precision.LossScaleOptimizer):
            with _applying_over_ranks() if is_spread else contextlib.nullcontext():
                return _skip_scaled(optimizer) if nothing else original(optimizer, kept, *args, **kwargs)
        clips = is_spread and _clips_by_all(optimizer)
        if nothing and is_spread and is_users:
            with norms.counting([True]):
                return original(optimizer, [(tf.zeros([0]), _stand_in())], *args, **kwargs)
        if nothing:
            if clips:
                norms.norm_of_own([])
            return _only_count(optimizer)
        if not clips and not (is_spread and is_users):
            return original(optimizer, kept, *args, **kwargs)
        with norms.counting([_is_counted(variable, optimizer) for gradient, variable in kept if gradient is not None]):
            return original(optimizer, kept, *args, **kwargs)

    return apply_gradients


def _unjoined(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keras's sum over the replicas of a strategy of TensorFlow's, left out where there is none.

    It makes one op of all gradients, so that the first weight would wait for the average of the last one.
    """

    def aggregate_gradients(optimizer: Any, grads_and_vars: Iterable[Any]) -> Any:
        pairs = list(grads_and_vars)
        running = runtime.current_or_none()
        is_ours = running is not None and is_split(running) and _are_of_models(variable for _, variable in pairs)
        # The older ones take a function that makes something else of gradients.
        usual = tf_internals.usual_gradient_aggregator()
        is_usual = _is_of_keras(original) and getattr(optimizer, "gradient_aggregator", usual) is usual
        if is_ours and is_usual and not tf.distribute.has_strategy():
            return pairs
        return original(optimizer, pairs)

    return aggregate_gradients


def _is_of_keras(method: Callable[..., Any]) -> bool:
    """Whether a method is Keras's own; one of the script's may clip by the norm of what it is given, for one."""
    return method.__module__.startswith("tf_keras.")


@functools.cache
def _stand_in() -> tf.Variable:
    """What a class of the script's is given where this rank has nothing to apply.

    What the class computes of all gradients, such as their norm, other ranks wait for. Keras's own `apply_gradients`
    leaves this out.
    """
    empty = np.zeros([0], np.float32)
    return variables.make_script_variable(initial_value=empty, trainable=False, name="smp_nothing")


def _is_stand_in(variable: Any) -> bool:
    return _stand_in.cache_info().currsize > 0 and variable is _stand_in()


def _when_computed(pairs: Iterable[tuple[Any, Any]]) -> contextlib.AbstractContextManager[Any]:
    """A context whose ops wait until the tasks of this rank have ended, of which the gradients come.

    What an optimizer makes of its slots alone, such as momentum times the last change, TensorFlow would make at the
    step's begin otherwise, and a set of it would lie there beside the stash. Gradients that are no step's own, such as
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


def _clips_by_all(optimizer: Any) -> bool:
    """Whether an optimizer scales gradients by the norm of all of them."""
    limit = getattr(optimizer, "global_clipnorm", None)
    if isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer):
        return limit is not None
    return limit is not None and limit > 0 and not optimizer.clipnorm


def _is_counted(variable: Any, optimizer: Any) -> bool:
    """Whether this rank counts a gradient: that of a variable it owns; of one that all have, the first rank does."""
    topology = runtime.current().topology
    is_first = topology.dp_rank == 0 or not sharded_slots.are_shared()
    if variables.store_of(variable) is None:
        return topology.mp_rank == 0 and is_first
    if row_blocks.is_block(variable):
        return True
    if sharded_slots.replica_of(variable, optimizer) is None:
        return is_first
    return not sharded_slots.is_updated_elsewhere(variable, optimizer)


def _only_count(optimizer: Any) -> Any:
    """There is nothing to apply on this rank: the step counter and a scheduled rate move, as on all others."""
    with tf.init_scope():
        iterations = optimizer.iterations  # legacy optimizers make it now
        pending_restore.optimizer_ready(optimizer, built=False)
    tf_internals.follow_schedule(optimizer)
    return iterations.assign_add(1)


def _skip_scaled(optimizer: Any) -> Any:
    """The same for one that scales losses: with the others it decides whether gradients are applied."""
    wanted = tf_internals.update_loss_scale(optimizer)
    inner = optimizer.inner_optimizer
    if _spread.wrapped and not _is_of_keras(type(inner).apply_gradients):

        def apply_nothing() -> tf.Tensor:
            inner.apply_gradients([(tf.zeros([0]), _stand_in())])
            return tf.constant(True)

        def count() -> tf.Tensor:
            _only_count(inner)
            return tf.constant(True)

        return tf.__internal__.smart_cond.smart_cond(wanted, apply_nothing, count)
    if _clips_by_all(inner) and _spread.wrapped:
        # Those that apply gradients then reduce their norm, which every rank takes part in.
        tf.__internal__.smart_cond.smart_cond(
            wanted, lambda: norms.norm_of_own([]), lambda: tf.constant(0.0, _floatx())
        )
    return _only_count(inner)


def _floatx() -> Any:
    return tf_keras.backend.floatx()


def _all_finite_over_stages(original: Callable[..., Any]) -> Callable[..., Any]:
    def is_all_finite(gradients: Iterable[Any]) -> Any:
        present = [gradient for gradient in gradients if gradient is not None]
        here = original(present) if present else tf.constant(True)
        return norms.all_finite(here) if _spread.wrapped else here

    return is_all_finite
