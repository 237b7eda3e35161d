"""Makes some rows of a weight a variable of its own, which an optimizer updates in the weight's place.

    embedding [0:100]         replica 0                          replica 1
      rows  0 to 49       ─▶  block [50] ─ slots [50] ─▶ ┐       takes them
      rows 50 to 99           takes them                 │   ─▶  block [50] ─ slots [50] ─▶ ┐
                         ◀─── gathered by all replicas ──┴──────────────────────────────────┘

Before an update, a block is given the rows of the weight, since these may have been assigned to meanwhile. When the
rows are back in their place, the block is left without memory. Optimizers take it for the weight: it has the weight's
name, and the number by which they find slots, and what is exempt from decay.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from smp_tf import tf_internals
from smp_tf.errors import StepError
from smp_tf.keras import adapter
from smp_tf.partition.spread import EVERYWHERE, SplitOver
from smp_tf.replicas.gradient_marks import mark, mark_of
from smp_tf.sharding.layouts import here, slots_of
from smp_tf.variables import store
from smp_tf.variables.host_offload import update_on_host


def in_place(optimizer: Any, updated: Iterable[Any]) -> list[Any]:
    """Returns the variables that this rank updates, with blocks for those whose rows an optimizer updates.

    Args:
        optimizer: of Keras.
        updated: variables. Blocks among them are left as they are.
    """
    return [variable for _, variable in pairs_in_place(optimizer, ((None, variable) for variable in updated))]


def pairs_in_place(optimizer: Any, pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Returns the gradients, or None, and variables that this rank updates. A block has the gradient's rows.

    Args:
        optimizer: of Keras.
        pairs: gradients and variables.

    Raises:
        StepError: a step gives rows of a gradient, and the optimizer does not update rows by themselves any more.
    """
    found = []
    for gradient, variable in pairs:
        rows = None if is_block(variable) else slots_of(variable, optimizer).rows_at(here())
        given = mark_of(gradient).spread
        if isinstance(given, SplitOver) and given.rows_at(here()) != rows and not is_block(variable):
            raise StepError(
                f"A step that was built for it gives each replica some rows of the gradient of {variable.name!r}, and "
                f"{type(optimizer).__name__} does not update these by themselves any more. Compile the model again."
            )
        if rows is not None:
            gradient, variable = rows_of_gradient(gradient, rows), filled(variable, rows)
        found.append((gradient, variable))
    return found


def filled(variable: Any, rows: tuple[int, int]) -> tf.Variable:
    """Returns the block of a variable, with its present rows; in a function also while it is traced.

    Args:
        variable: of a distributed model.
        rows: the first row, and the row after the last.
    """
    with tf.init_scope():
        # Optimizers make slots outside functions, some from the weight's value.
        known = store.storage_of(variable).block
        block = known if known is not None else _made(variable, rows)
        _fill(block, variable, rows)
    if not tf.executing_eagerly():
        _fill(block, variable, rows)
    return block


def _made(variable: Any, rows: tuple[int, int]) -> tf.Variable:
    with update_on_host([variable]), tf_internals.kept_trace():
        block = store.make_script_variable(
            initial_value=tf.zeros([rows[1] - rows[0], *variable.shape[1:]], variable.dtype),
            trainable=variable.trainable,
            name=variable.name.partition(":")[0],
        )
    adapter.slots().let_take(block, variable)
    block.smp_whole = variable
    store.storage_of(variable).block = block
    return block


def _fill(block: tf.Variable, variable: Any, rows: tuple[int, int]) -> None:
    with update_on_host([variable]):
        value = variable.read_value()[rows[0] : rows[1]]
        # It has none of the rows at this time, and `assign` would fail for want of them.
        tf.raw_ops.AssignVariableOp(resource=block.handle, value=value, validate_shape=False)


def empty(updated: Iterable[Any]) -> None:
    """Leaves blocks without memory until they are filled again.

    Args:
        updated: variables. Those that are no blocks are not changed.
    """
    for block in (variable for variable in updated if is_block(variable)):
        nothing = tf.zeros([0, *block.shape[1:]], block.dtype)
        if not tf.executing_eagerly():
            # While a graph is made, known shapes are compared all the same.
            nothing = tf.raw_ops.PlaceholderWithDefault(input=nothing, shape=None)
        tf.raw_ops.AssignVariableOp(resource=block.handle, value=nothing, validate_shape=False)


def is_block(variable: Any) -> bool:
    """Returns whether a variable stands for rows of another one."""
    return store.whole_of(variable) is not variable


def rows_of_gradient(gradient: Any, rows: tuple[int, int]) -> Any:
    """Returns the gradient of some rows of a variable.

    Args:
        gradient: the gradient of the whole, as a tensor, sparse slices, or None; or that of the rows, marked as such.
        rows: the first row, and the row after the last.

    Returns:
        The same kind of gradient, of these rows. The marks of the gradient are kept.
    """
    known = mark_of(gradient)
    if gradient is None or isinstance(known.spread, SplitOver):
        return gradient
    start, stop = rows
    if isinstance(gradient, tf.IndexedSlices):
        is_inside = tf.logical_and(gradient.indices >= start, gradient.indices < stop)
        values, indices = tf.boolean_mask(gradient.values, is_inside), tf.boolean_mask(gradient.indices, is_inside)
        shape = tf.concat([[stop - start], tf.cast(tf.shape(gradient.values)[1:], tf.int32)], axis=0)
        found: Any = tf.IndexedSlices(values, indices - tf.cast(start, indices.dtype), shape)
    else:
        found = tf.convert_to_tensor(gradient)[start:stop]
    return mark(found, spread=EVERYWHERE if known.is_average else None, computed=known.computed)


def put(variable: Any, rows: tuple[int, int], value: tf.Tensor) -> None:
    """Writes some rows into a variable's memory.

    Args:
        variable: of a distributed model.
        rows: the first row, and the row after the last.
        value: the value of the rows.
    """
    tf.raw_ops.ResourceStridedSliceAssign(ref=variable.handle, begin=[rows[0]], end=[rows[1]], strides=[1], value=value)
