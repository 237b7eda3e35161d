"""Keeps Keras's optimizers to the variables that this rank stores and updates."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf

from smp_tf import tf_internals
from smp_tf.checkpoint import pending
from smp_tf.errors import StepError
from smp_tf.gradients import norms
from smp_tf.job import runtime
from smp_tf.keras import adapter
from smp_tf.keras.optimizer_methods import OWN_APPLY, REPLACED_APPLY, Wrapper, met, note
from smp_tf.keras.optimizer_trials import is_on_trial
from smp_tf.keras.patch import Patch
from smp_tf.optimizer.apply import (
    are_of_models,
    filtered_apply,
    in_force,
    is_divided,
    recorded,
    stored_here,
    unjoined,
    updated_here,
)
from smp_tf.sharding import gather, layouts, row_blocks, shares
from smp_tf.variables import assigned_values
from smp_tf.variables.host_offload import are_slots_on_host, are_updates_offloaded, update_on_host
from smp_tf.variables.store import keep_for_good, store_of


class OptimizerPatch(Patch):
    """Makes optimizers skip what this rank does not store.

    Pairs of a gradient and a variable of another rank are dropped before an optimizer builds its slots. So no slot is
    made for them, and no warning is printed. The iteration counter advances all the same. What an optimizer decides by
    all gradients (the norm to clip by, and whether they are finite) is reduced over the stages. Where replicas share
    the slots, pairs of other shares are dropped, too, and the new weights are gathered. With optimizer_offload, slots
    are made and updates are computed on the host. The script's own methods are replaced where they are looked up, even
    those that are defined later (`optimizer_methods.py`).
    """

    def _replace(self) -> None:
        wrappers = {**_WRAPPERS, **_ON_HOST} if are_updates_offloaded() else _WRAPPERS
        for name, wrapper in wrappers.items():
            for optimizer in adapter.optimizers().classes_defining(name):
                if adapter.optimizers().is_own_module(optimizer.__module__):
                    self._wrap(optimizer, name, wrapper)
                    note(optimizer.__dict__[name], self._originals[-1][2])
        for optimizer in adapter.optimizers().classes_defining("__getattribute__"):
            self._wrap(optimizer, "__getattribute__", _meeting(wrappers))
        # The legacy optimizers define it themselves.
        self._add(adapter.optimizers().base(), "__getattribute__", _meeting(wrappers)(object.__getattribute__))
        self._wrap(*adapter.optimizers().finiteness_check(), _all_finite_over_stages)


#: In force from the first distributed model until `smp.shutdown`.
optimizer_patch = OptimizerPatch()


def _meeting(wrappers: Mapping[str, Wrapper]) -> Wrapper:
    """Returns what makes a lookup on an optimizer that finds ours in place of the script's methods, by their names."""

    def of_lookup(original: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def __getattribute__(optimizer: Any, name: str) -> Any:  # noqa: N807
            found = original(optimizer, name)
            if name not in wrappers:
                return found
            averages_first = name == "apply_gradients" and OWN_APPLY in vars(optimizer)
            return met(optimizer, name, found, recorded if averages_first else wrappers[name])

        return __getattribute__

    return of_lookup


def _filtered_build(original: Callable[..., Any]) -> Callable[..., Any]:
    def build(optimizer: Any, var_list: Iterable[Any]) -> Any:
        wanted = list(var_list)
        if is_on_trial(optimizer):
            return original(optimizer, wanted)
        _refuse_what_is_undecided(wanted)
        if not in_force.is_inside:
            # The script builds it on every rank. The slots are made where the variables are now.
            keep_for_good(wanted)
        _require_the_same_shares(optimizer, wanted)
        shares.require_rows_as_before(optimizer, wanted)
        # A class's `build` calls that of its base first, when not all slots exist.
        outermost = optimizer not in _being_built
        _being_built.add(optimizer)
        kept = row_blocks.in_place(optimizer, [v for v in wanted if updated_here(v, optimizer)])
        try:
            with update_on_host(kept), _slots_need_no_second_trace(kept):
                # Some optimizers look at the first variable.
                result = original(optimizer, kept) if kept or not wanted else None
        finally:
            if outermost:
                _being_built.discard(optimizer)
                if not in_force.is_inside:
                    row_blocks.empty(kept)
        if outermost:
            adapter.optimizers().begin_step(optimizer)
            pending.optimizer_ready(optimizer, built=bool(kept) or not wanted)
        return result

    return build


_being_built: weakref.WeakSet[Any] = weakref.WeakSet()


def _slots_need_no_second_trace(weights: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Lets a `tf.function` keep the trace in which the slots of distributed models' weights are made.

    Args:
        weights: the weights that slots are made for.
    """
    return tf_internals.kept_trace() if are_of_models(weights) else contextlib.nullcontext()


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
        if are_updates_offloaded() and are_of_models(wanted):
            name = type(optimizer).__name__
            raise StepError(
                f"optimizer_offload keeps slots on the host, and tf_keras.optimizers.legacy.{name} keeps them beside "
                f"its weights. Use the optimizer of tf_keras.optimizers, or leave optimizer_offload out."
            )
        _require_the_same_shares(optimizer, wanted)
        with _slots_need_no_second_trace(wanted):
            result = original(optimizer, wanted)
        with tf.init_scope():
            pending.optimizer_ready(optimizer)
        return result

    return _create_all_weights


def _require_the_same_shares(optimizer: Any, wanted: Iterable[Any]) -> None:
    """Raises an error where an optimizer has slots for another share of the variables than this rank updates now."""
    if runtime.current_or_none() is None or not are_of_models(wanted):
        return
    then = _in_words(shares.shares_of(optimizer), are_slots_on_host(optimizer))
    now = _in_words(layouts.count(), are_updates_offloaded())
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
    """Raises an error where an optimizer would make slots on every rank, since no stage owns the variables yet."""
    running = runtime.current_or_none()
    if running is None or not is_divided(running):
        return
    for variable in wanted:
        store = store_of(variable)
        state = store.state(variable) if store is not None else None
        if state is not None and (state.owner is None or state.storage.is_early):
            raise StepError(
                f"An optimizer was to be built for variable {state.name!r} before the first step of its model. Which "
                f"of the {running.topology.size} ranks has slots for the variable is not decided yet, so every rank "
                f"would make them. Build the optimizer after the first step, or not at all: apply_gradients does it."
            )


def _filtered_finalize(original: Callable[..., Any]) -> Callable[..., Any]:
    def finalize_variable_values(optimizer: Any, var_list: Iterable[Any]) -> Any:
        stored = [v for v in var_list if stored_here(v)]
        updated = [v for v in stored if updated_here(v, optimizer)]
        has_averages = getattr(optimizer, "use_ema", False)
        with assigned_values.unnoted():
            result = original(optimizer, row_blocks.in_place(optimizer, updated) if has_averages else updated)
            if has_averages:
                gather.gather(optimizer, stored)
        return result

    return finalize_variable_values


def _all_finite_over_stages(original: Callable[..., Any]) -> Callable[..., Any]:
    def is_all_finite(gradients: Iterable[Any]) -> Any:
        present = [gradient for gradient in gradients if gradient is not None]
        here = original(present) if present else tf.constant(True)
        return norms.all_finite(here) if in_force.is_wrapped else here

    return is_all_finite


#: The functions that replace methods, by method.
_WRAPPERS: dict[str, Wrapper] = {
    "build": _filtered_build,
    # The legacy optimizers have no `build`. They make their slots here.
    "_create_all_weights": _reported_weights,
    "apply_gradients": filtered_apply,
    REPLACED_APPLY: filtered_apply,
    "aggregate_gradients": unjoined,
    "_aggregate_gradients": unjoined,
    "finalize_variable_values": _filtered_finalize,
}
#: With optimizer_offload these, too. They are called where Keras has placed new variables next to the weight.
_ON_HOST: dict[str, Wrapper] = {
    "_update_step": _updated_on_host,
    "add_variable_from_reference": _made_on_host,
}
