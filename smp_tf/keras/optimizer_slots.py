"""The state of Keras optimizers: which variable is the slot of which weight. For tf_keras, old and new optimizers.

The new optimizers keep slots in lists, one entry per variable that they were built for, in an order that is the rank's
own. A list that is as long as the optimizer's index of variables is one of slots:

    optimizer._index_dict   {key of kernel: 0, key of bias: 1}
    optimizer._momentums    [of kernel,        of bias]          ─▶ (kernel, "momentums"), (bias, "momentums")

Some of their slots are made without a reference to the weight (Adafactor), so looking at what is made would not do.
The legacy optimizers name theirs (`get_slot_names`, `get_slot`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from smp_tf import tf_internals
from smp_tf.keras.optimizer_methods import has_own_apply

_NEW = tf_keras.optimizers.Optimizer
_LEGACY = tf_keras.optimizers.legacy.Optimizer
# All slots and other variables once more, in the order in which they were made; and the index.
_NOT_STATE = ("_variables", "_index_dict")

#: Of the matrix whose slots are counted.
_SIDE = 64
#: Of the matrix that is updated whole and in two pieces: rows, rows of the first piece, columns, and how often it is.
_ROWS, _BORDER, _COLUMNS, _UPDATES = 8, 3, 4, 9

#: Optimizers that have reported on this rank, and whether they were built for variables here.
_reported: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

#: Whether optimizers make of some rows of a weight what they make of them within all.
_updates_rows: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

#: Copies of optimizers that are being tried out.
_trials: weakref.WeakSet[Any] = weakref.WeakSet()


def is_optimizer(value: Any) -> bool:
    """Returns whether something is a Keras optimizer."""
    return isinstance(value, (_NEW, _LEGACY))


def innermost(optimizer: Any) -> Any:
    """Returns the optimizer that has the slots: the one inside, for a `LossScaleOptimizer`."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def report(optimizer: Any, built: bool) -> bool:
    """Notes that an optimizer has made its slots on this rank, or that it has none to make here.

    Args:
        optimizer: any Keras optimizer.
        built: whether it was built for variables of this rank.

    Returns:
        Whether that is new.
    """
    inner = innermost(optimizer)
    known = _reported.get(inner)
    _reported[inner] = built or bool(known)
    return known is None or (built and not known)


def slots_of(optimizer: Any) -> float | None:
    """Returns how many slots an optimizer keeps for a variable, in sizes of the variable.

    A copy of it is built for a small variable; the optimizer itself stays as it is.

    Args:
        optimizer: any Keras optimizer.

    Returns:
        The number, such as 2.0 for Adam, what it keeps besides slots included; None where it cannot be copied, or says
        nothing of what it keeps.
    """
    given = innermost(optimizer)
    try:
        with tf.init_scope():
            copy = type(given).from_config(given.get_config())
            variable = tf.Variable(tf.zeros([_SIDE, _SIDE]))
            copy.build([variable]) if isinstance(copy, _NEW) else copy._create_all_weights([variable])
    except Exception:
        # It is a user's class, of which anything may be expected.
        return None
    found = copy.variables() if callable(copy.variables) else copy.variables
    _reported.pop(copy, None)
    # What an optimizer of smp_tf keeps besides its slots it says itself.
    beside = given.slots_beside() if hasattr(given, "slots_beside") else 0.0
    return sum(slot.shape.num_elements() for slot in found if slot.shape.rank) / _SIDE**2 + beside


def is_on_trial(optimizer: Any) -> bool:
    """Returns whether an optimizer is a copy by which another one's ways are found out."""
    return optimizer in _trials


def updates_rows(optimizer: Any) -> bool:
    """Returns whether an optimizer makes of some rows of a weight, given alone, what it makes of them within the whole.

    It is tried out when this is first asked, on copies: one updates a small matrix, another one its upper and its lower
    rows. Adafactor, which looks at columns, does not, nor one that clips each gradient by its norm. One that cannot be
    copied, that changes nothing in some updates, or whose class has an `apply_gradients` of its own, which may send
    something, is taken for one that does not.

    Args:
        optimizer: any Keras optimizer.
    """
    inner = innermost(optimizer)
    if inner not in _updates_rows:
        # Where the signs of gradients are all that counts, trying it out would not show that it clips.
        if getattr(inner, "clipnorm", None) or has_own_apply(inner):
            _updates_rows[inner] = False
            return False
        try:
            with tf.init_scope(), tf_internals.kept_trace():
                _updates_rows[inner] = _makes_the_same_of_rows(inner)
        except Exception:
            # It is a user's class, of which anything may be expected.
            _updates_rows[inner] = False
    return _updates_rows[inner]


def has_whole_slots(optimizer: Any, variable: Any) -> bool:
    """Returns whether an optimizer has a slot of a variable that is of its shape."""
    return any(slot.shape == variable.shape for _, _, slot in slots(optimizer, [variable]))


def _makes_the_same_of_rows(given: Any) -> bool:
    generator = np.random.default_rng(0)
    value = generator.normal(size=[_ROWS, _COLUMNS]).astype(np.float32)
    whole, pieces = [tf.Variable(value)], [tf.Variable(value[:_BORDER]), tf.Variable(value[_BORDER:])]
    config = given.get_config()
    if "learning_rate" in config:
        # It may be small, or grow from nothing.
        config["learning_rate"] = 0.1
    copies = []
    for _ in range(2):
        copies.append(type(given).from_config(dict(config)))
        _trials.add(copies[-1])
        if hasattr(copies[-1], "jit_compile"):
            copies[-1].jit_compile = False
    for _ in range(_UPDATES):
        # Large, and larger in some rows, so that whatever clips does.
        gradient = (generator.normal(size=value.shape) * 10.0 ** np.arange(_ROWS)[:, None]).astype(np.float32)
        copies[0].apply_gradients([(tf.constant(gradient), whole[0])])
        parts = gradient[:_BORDER], gradient[_BORDER:]
        copies[1].apply_gradients([(tf.constant(part), piece) for part, piece in zip(parts, pieces, strict=True)])
    if np.array_equal(whole[0].numpy(), value):
        return False
    together = np.concatenate([piece.numpy() for piece in pieces])
    # Of several ops for a slice of memory, processors may round the last elements otherwise.
    return bool(np.allclose(together, whole[0].numpy(), rtol=1e-5, atol=1e-6))


def slot_bytes_here() -> int:
    """Returns the bytes of slots and errors that optimizers of variables of this rank have here."""
    found = 0
    for optimizer in in_use():
        variables = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
        found += sum(v.shape.num_elements() * v.dtype.size for v in variables if v.shape.rank)
        found += optimizer.error_feedback.nbytes if hasattr(optimizer, "error_feedback") else 0
    return found


def in_use() -> list[Any]:
    """Returns the optimizers that were built for variables of this rank."""
    return [optimizer for optimizer, built in _reported.items() if built]


def is_ready(optimizer: Any) -> bool:
    """Returns whether an optimizer has made its slots, or is known to need none on this rank."""
    return innermost(optimizer) in _reported or has_slots(optimizer)


def has_slots(optimizer: Any) -> bool:
    """Returns whether an optimizer has been built for variables on this rank."""
    inner = innermost(optimizer)
    if isinstance(inner, _NEW):
        return bool(getattr(inner, "_index_dict", None))
    return bool(inner.get_slot_names()) or _reported.get(inner, False)


def children(optimizer: Any) -> dict[str, Any]:
    """Returns what an optimizer tracks, by name, without its slots.

    Args:
        optimizer: any Keras optimizer.
    """
    inner = innermost(optimizer)
    # The new optimizers keep their first answer, and would leave out for ever what they make later.
    vars(inner).pop("_coalesced_children", None)
    tracked: Mapping[str, Any] = tf.train.TrackableView.children(optimizer)
    vars(inner).pop("_coalesced_children", None)
    left_out = {*_NOT_STATE, *_slot_lists(inner)}
    return {name: child for name, child in tracked.items() if name not in left_out}


def slots(optimizer: Any, variables: Iterable[tf.Variable]) -> Iterator[tuple[tf.Variable, str, tf.Variable]]:
    """Yields the slots of variables.

    Args:
        optimizer: any Keras optimizer.
        variables: those whose slots are wanted.

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


def is_new(optimizer: Any) -> bool:
    """Returns whether an optimizer is of the new kind, which keeps slots in lists."""
    return isinstance(innermost(optimizer), _NEW)


def add_slots(optimizer: Any, variable: Any) -> bool:
    """Makes slots for one more variable, in an optimizer of the new kind that may have been built for others.

    It is built anew for that variable alone; what it has then is put after what it had, and all else is as before.

    Args:
        optimizer: any Keras optimizer of the new kind.
        variable: the variable.

    Returns:
        Whether it has slots for the variable now; not where another replica is to have them.
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
