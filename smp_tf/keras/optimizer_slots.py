"""What optimizers of tf_keras, old and new, keep: which variable is the slot of which weight.

The new optimizers keep slots in lists, with one entry per variable that they were built for, in the rank's own order. A
list that is as long as the optimizer's index of variables is a list of slots:

    optimizer._index_dict   {key of kernel: 0, key of bias: 1}
    optimizer._momentums    [of kernel,        of bias]          ─▶ (kernel, "momentums"), (bias, "momentums")

Some of their slots are made without a reference to the weight (Adafactor), so watching what is made would not suffice.
The legacy optimizers name their slots (`get_slot_names`, `get_slot`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf
import tf_keras

_NEW = tf_keras.optimizers.Optimizer
_LEGACY = tf_keras.optimizers.legacy.Optimizer
#: Attributes that hold all slots and other variables once more, in the order in which they were made; and the index.
_NOT_STATE = ("_variables", "_index_dict")


def is_optimizer(value: Any) -> bool:
    """Returns whether an object is a Keras optimizer."""
    return isinstance(value, (_NEW, _LEGACY))


def innermost(optimizer: Any) -> Any:
    """Returns the optimizer that has the slots. For a `LossScaleOptimizer` it is the one inside."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def make_slots(optimizer: Any, variables: list[tf.Variable]) -> None:
    """Makes the slots of an optimizer that has none yet."""
    optimizer.build(variables) if isinstance(optimizer, _NEW) else optimizer._create_all_weights(variables)


def variables_of(optimizer: Any) -> list[tf.Variable]:
    """Returns all variables that an optimizer keeps."""
    return list(optimizer.variables() if callable(optimizer.variables) else optimizer.variables)


def has_slots(optimizer: Any) -> bool | None:
    """Returns whether an optimizer has been built for variables on this rank; None where it does not say."""
    inner = innermost(optimizer)
    if isinstance(inner, _NEW):
        return bool(getattr(inner, "_index_dict", None))
    return True if inner.get_slot_names() else None


def children(optimizer: Any) -> dict[str, Any]:
    """Returns what an optimizer tracks, by name, without its slots.

    Args:
        optimizer: any Keras optimizer.
    """
    inner = innermost(optimizer)
    # The new optimizers keep their first answer, and would never include what they make later.
    vars(inner).pop("_coalesced_children", None)
    tracked: Mapping[str, Any] = tf.train.TrackableView.children(optimizer)
    vars(inner).pop("_coalesced_children", None)
    left_out = {*_NOT_STATE, *_slot_lists(inner)}
    return {name: child for name, child in tracked.items() if name not in left_out}


def slots(optimizer: Any, variables: Iterable[tf.Variable]) -> Iterator[tuple[tf.Variable, str, tf.Variable]]:
    """Yields the slots of variables.

    Args:
        optimizer: any Keras optimizer.
        variables: variables whose slots are wanted.

    Yields:
        A variable, the name of the slot without leading underscores, and the slot. For an optimizer of the new kind.
    """
    inner = innermost(optimizer)
    if isinstance(inner, _NEW):
        index = getattr(inner, "_index_dict", None) or {}
        lists = _slot_lists(inner)
        for variable in variables:
            place = index.get(inner._var_key(variable))
            if place is not None:
                for name, values in lists.items():
                    yield variable, name.lstrip("_"), values[place]
        return
    for name in inner.get_slot_names():
        for variable in variables:
            try:
                yield variable, name, inner.get_slot(variable, name)
            except KeyError:
                continue


def can_move_slots(optimizer: Any) -> bool:
    """Returns whether an optimizer is new, so that its slots can be added and dropped by variable."""
    return isinstance(innermost(optimizer), _NEW)


def add_slots(optimizer: Any, variable: Any) -> bool:
    """Makes slots for one more variable in a new optimizer, which may have been built for others.

    The optimizer is built anew for that variable alone. Then the new slots are put after the old ones, and all else is
    as before.

    Args:
        optimizer: any Keras optimizer of the new kind.
        variable: the variable.

    Returns:
        Whether it has slots for the variable now. It has none where another replica is to have them.
    """
    inner, key = innermost(optimizer), innermost(optimizer)._var_key(variable)
    if key in (getattr(inner, "_index_dict", None) or {}):
        return True
    before, lists = dict(vars(inner)), {name: list(values) for name, values in _slot_lists(inner).items()}
    index = dict(getattr(inner, "_index_dict", None) or {})
    inner._built = False
    inner.build([variable])
    if key not in (getattr(inner, "_index_dict", None) or {}):
        for name, value in before.items():
            if vars(inner).get(name) is not value:
                setattr(inner, name, value)
        return False
    if not index:
        return True
    made = {name: list(values) for name, values in _slot_lists(inner).items()}
    for name, value in before.items():
        if name in lists:
            setattr(inner, name, lists[name] + made[name])
        elif name not in (*_NOT_STATE, "_built") and vars(inner).get(name) is not value:
            setattr(inner, name, value)
    inner._index_dict = {**index, key: len(index)}
    return True


def drop_slots(optimizer: Any, variable: Any) -> None:
    """Forgets the slots of one variable, in an optimizer of the new kind.

    Args:
        optimizer: any Keras optimizer of the new kind.
        variable: the variable.
    """
    inner = innermost(optimizer)
    index = dict(getattr(inner, "_index_dict", None) or {})
    place = index.pop(inner._var_key(variable), None)
    if place is None:
        return
    dropped = set()
    for name, values in _slot_lists(inner).items():
        dropped.add(id(values[place]))
        setattr(inner, name, [value for number, value in enumerate(values) if number != place])
    inner._index_dict = {key: number - (number > place) for key, number in index.items()}
    inner._variables = [value for value in inner._variables if id(value) not in dropped]


def count_of_variables(optimizer: Any) -> int | None:
    """Returns for how many variables an optimizer has slots; None where it does not say."""
    inner = innermost(optimizer)
    return len(getattr(inner, "_index_dict", None) or {}) if isinstance(inner, _NEW) else None


def has_slot_lists(optimizer: Any) -> bool:
    """Returns whether an optimizer of the new kind keeps any slots."""
    return bool(_slot_lists(innermost(optimizer)))


def let_take(variable: tf.Variable, other: tf.Variable) -> None:
    """Lets Keras's optimizers take a variable for another one, so that it has the other's slots and decay.

    Optimizers know variables by this number and by their names, which have the scope that is open where they are made.
    This works with TensorFlow and tf_keras 2.16 to 2.21.
    """
    variable._unique_id = other._unique_id
    variable._handle_name = other.name


def _slot_lists(optimizer: Any) -> dict[str, Any]:
    """Returns the attributes of an optimizer of the new kind that hold slots."""
    index = getattr(optimizer, "_index_dict", None)
    if not index:
        return {}
    return {
        name: values
        for name, values in vars(optimizer).items()
        if name not in _NOT_STATE
        and isinstance(values, list)
        and len(values) == len(index)
        and all(isinstance(value, tf.Variable) for value in values)
    }
