"""Variables that check, before they are read or written, whether this rank stores them.

                   before the plan           stored here     stored by another rank
read               an error                  the value       an error; `weight_reads` has what all ranks may call
assign             the new initial value     is assigned     is left out: the owner is given it, too
in a tf.function   an error                  as usual        an error; within a step it is only traced
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from smp_tf import tf_internals
from smp_tf.errors import OwnershipError
from smp_tf.keras import adapter
from smp_tf.variables import assigned_values, foreign_values, refused_reads
from smp_tf.variables.state import VariableState, set_initial_value


class _Tracing(threading.local):
    depth = 0
    made_at_once = False
    is_building = False


_tracing = _Tracing()


@contextlib.contextmanager
def tracing_step() -> Iterator[None]:
    """Lets graphs read variables without storage within its context, since a graph is written and nothing runs."""
    before = _tracing.depth
    _tracing.depth = before + 1
    try:
        yield
    finally:
        _tracing.depth = before


@contextlib.contextmanager
def building_model() -> Iterator[None]:
    """Does what `tracing_step` does while a model is constructed.

    Raises:
        OwnershipError: the script ran a function there that reads weights, which have no values yet.
    """
    before = _tracing.is_building
    _tracing.is_building = True
    try:
        with tracing_step(), tf_internals.functions_checked(_check_runnable):
            yield
    finally:
        _tracing.is_building = before


def _check_runnable(variables: Iterable[tf.Variable]) -> None:
    if _tracing.is_building and any(isinstance(v, _Guarded) and not v.smp_state.has_value for v in variables):
        raise OwnershipError(refused_reads.run_while_building())


@contextlib.contextmanager
def made_at_once() -> Iterator[None]:
    """Lets models make variables with their values within its context, for code that uses them before a plan."""
    before = _tracing.made_at_once
    _tracing.made_at_once = True
    try:
        yield
    finally:
        _tracing.made_at_once = before


def is_made_at_once() -> bool:
    """Returns whether models make variables with their values now."""
    return _tracing.made_at_once


def _check_readable(variable: Any, doing: str) -> None:
    state: VariableState = variable.smp_state
    if state.has_value or (_tracing.depth and not tf.executing_eagerly()):
        return
    layer = adapter.layers().layer_in_call()
    if state.owner is not None:
        raise OwnershipError(refused_reads.of_another_rank(state.name, layer, state.owner, doing))
    if _tracing.is_building and doing == "read":
        raise OwnershipError(refused_reads.while_building(state.name, layer))
    raise OwnershipError(refused_reads.before_the_plan(state.name, layer, doing))


def _check_fits(variable: Any, value: Any) -> None:
    shape = value.shape if hasattr(value, "shape") else tf.convert_to_tensor(value, variable.dtype).shape
    if not variable.shape.is_compatible_with(shape):
        raise ValueError(
            f"Cannot assign a value of shape {tuple(shape)} to variable {variable.smp_state.name!r} of shape "
            f"{tuple(variable.shape)}."
        )


def _check_saved(variable: Any) -> None:
    # While the structure of a model is written, its values are left out on purpose.
    state: VariableState = variable.smp_state
    if state.has_value or _tracing.depth:
        return
    if state.owner is None:
        _check_readable(variable, "save or restore")
    raise OwnershipError(
        f"Cannot save or restore variable {state.name!r} here: partition {state.owner} owns it and only its rank "
        f"stores it, so a checkpoint of this rank would lack it. smp.CheckpointManager(checkpoint, directory), used on "
        f"every rank, saves and restores the variables of all partitions."
    )


def _take_from_checkpoint(variable: Any, value: tf.Tensor) -> bool:
    """Takes what TensorFlow reads from a checkpoint as the initial value of a variable that nobody stores yet.

    In this way Keras's `load_model` and `load_weights` give values to a model that is built by a function, or in the
    constructor of a subclass.
    """
    if variable.smp_state.has_value or variable.smp_state.owner is not None:
        return False
    _check_fits(variable, value)
    return set_initial_value(variable, foreign_values.later(value, variable.dtype))


_Checked: Any = tf_internals.checked_in_checkpoints(_check_saved, _take_from_checkpoint)


class _Guarded(_Checked):
    """A variable of a distributed model, which checks before each read or write that this rank stores it."""

    smp_state: VariableState

    def _read_variable_op(self, *args: Any, **kwargs: Any) -> Any:
        if not self.smp_state.has_value and tf.executing_eagerly():
            fetch = foreign_values.fetch()
            if fetch is not None:
                return fetch(self)
        _check_readable(self, "read")
        return super()._read_variable_op(*args, **kwargs)

    def sparse_read(self, *args: Any, **kwargs: Any) -> Any:
        """Does what `tf.Variable.sparse_read` does. It is an error on a rank that does not store the variable."""
        _check_readable(self, "read")
        return super().sparse_read(*args, **kwargs)

    def gather_nd(self, *args: Any, **kwargs: Any) -> Any:
        """Does what `tf.Variable.gather_nd` does. It is an error on a rank that does not store the variable."""
        _check_readable(self, "read")
        return super().gather_nd(*args, **kwargs)

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Does what `tf.Variable.assign` does, except on a rank that does not store the variable.

        Before it is decided who stores it, the value replaces the initial one.
        """
        if not self.smp_state.has_value and self.smp_state.owner is None and tf.executing_eagerly():
            _check_fits(self, value)
            set_initial_value(self, foreign_values.later(value, self.dtype))
            return self
        if _leaves_out(self, "assign", (value,)):
            _check_fits(self, value)
            return self
        return super().assign(foreign_values.as_array(value), *args, **kwargs)

    def assign_add(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        """Does what `tf.Variable.assign_add` does, except on a rank that does not store the variable."""
        if _leaves_out(self, "assign_add", (delta,)):
            _check_fits(self, delta)
            return self
        return super().assign_add(delta, *args, **kwargs)

    def assign_sub(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        """Does what `tf.Variable.assign_sub` does, except on a rank that does not store the variable."""
        if _leaves_out(self, "assign_sub", (delta,)):
            _check_fits(self, delta)
            return self
        return super().assign_sub(delta, *args, **kwargs)


def _leaves_out(variable: Any, method: str, given: tuple[Any, ...]) -> bool:
    """Returns whether an assignment belongs to another rank, and notes the assignment on both ranks.

    Args:
        variable: the variable that is assigned to.
        method: the method of `tf.Variable` that was called.
        given: the arguments of the call.

    Raises:
        OwnershipError: nobody stores the variable yet, or another rank does and a graph is being written.
    """
    state: VariableState = variable.smp_state
    if state.owner is None or not tf.executing_eagerly():
        _check_readable(variable, "assign to")
        return False
    if not foreign_values.leaves_out():
        assigned_values.note(state, method, given, variable.dtype, is_left_out=state.is_elsewhere)
    return state.is_elsewhere


#: The arguments of such a method that hold what it writes, and where.
_WRITTEN = ("sparse_delta", "indices", "updates")


def _guard_scatters() -> None:
    """Gives `_Guarded` the methods that write parts of a variable. They are left out where it is not stored."""

    def guarded(name: str) -> Callable[..., Any]:
        signature = inspect.signature(getattr(tf_internals.ResourceVariable, name))

        def write(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = signature.bind(self, *args, **kwargs).arguments
            if _leaves_out(self, name, tuple(given[value] for value in _WRITTEN if value in given)):
                return self
            return getattr(super(_Guarded, self), name)(*args, **kwargs)

        write.__name__ = name
        write.__doc__ = f"As `tf.Variable.{name}`; left out on a rank that does not store the variable."
        return write

    for name in dir(tf_internals.ResourceVariable):
        if name.startswith(("scatter_", "batch_scatter_")):
            setattr(_Guarded, name, guarded(name))


_guard_scatters()


class DeferredVariable(_Guarded, tf_internals.UninitializedVariable):
    """A resource variable whose storage appears only on the rank that owns it.

    Args:
        state: what smp_tf knows about the variable.
        kwargs: arguments of `tf.Variable`, without an initial value.
    """

    def __init__(self, state: VariableState, **kwargs: Any) -> None:
        self.smp_state = state
        super().__init__(**kwargs)


class BuiltVariable(_Guarded, tf_internals.ResourceVariable):
    """A variable that was built with its value, once it is decided who stores it. Other ranks have freed it."""
