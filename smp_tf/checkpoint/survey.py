"""Finds what a checkpoint holds, and under which keys, by a breadth-first walk of the object graph.

    tf.train.Checkpoint ─┬─ model ─── dense ─┬─ kernel       model/dense/kernel
                         │                   └─ bias         model/dense/bias
                         ├─ optimizer ─┬─ _iterations        optimizer/_iterations
                         │             └─ _momentums[0]      model/dense/kernel/.OPTIMIZER_SLOT/optimizer/momentums
                         └─ best                             best

A variable's key is its shortest path of attributes from the root, as in TensorFlow's checkpoints. It does not depend on
the number of partitions. A slot's key is made from that of its variable, and never from an index, even where a rank has
the slot of only some rows. As in TensorFlow, "/" and "." in a name are written ".S" and "..", so that a name after "/."
is never the user's.

A survey can be handed on. `Survey.again` surveys the same objects later, without another walk.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import deque
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from smp_tf import tf_internals
from smp_tf.keras import adapter, optimizer_reports
from smp_tf.partition.layout import NO_STAGE, Layout
from smp_tf.partition.spread import EVERYWHERE, Spread
from smp_tf.sharding import layouts, shares
from smp_tf.variables.models import SplitModel, is_distributed
from smp_tf.variables.store import store_of

_SLOT = "/.OPTIMIZER_SLOT/"
_STATE = "/.ATTRIBUTES/"


class StateKind(str, enum.Enum):
    """What a tensor of a checkpoint is the state of."""

    MODEL = "model"
    """A variable of a distributed model, which its owner stores."""
    SLOT = "slot"
    """An optimizer's slot, which the owner of its variable stores, or one replica of it."""
    OPTIMIZER = "optimizer"
    """Another variable of an optimizer, such as its step counter."""
    SCRIPT = "script"
    """Any other variable, which every rank has."""
    STATE = "state"
    """State of something that is no variable: a table, an iterator, a Python object."""


@dataclasses.dataclass(frozen=True)
class Item:
    """One tensor that a checkpoint holds of the present objects.

    Args:
        key: its name in the checkpoint.
        kind: what it is the state of.
        target: the variable; for StateKind.STATE the object whose state it is a part of.
        layout: layout of the variable, or of the variable whose slot it is. It has no stage for what every rank has,
            and for what is not decided yet.
        is_here: whether this rank stores it.
        optimizer: path of the optimizer it belongs to, or "".
        spread: how it lies over the ranks of its stage. A slot may be on one replica, or rows of it on each.
        part: which part of the object's state, for StateKind.STATE.
        rows: for a slot of a weight that is cut into rows, the first row and the row after the last. The other replicas
            of the stage have the slots of the other rows.
        extent: number of rows of the weight, where `rows` are given.
    """

    key: str
    kind: StateKind
    target: Any
    layout: Layout = NO_STAGE
    is_here: bool = True
    optimizer: str = ""
    spread: Spread = EVERYWHERE
    part: str = ""
    rows: tuple[int, int] | None = None
    extent: int = 0

    @property
    def stage(self) -> int | None:
        """Returns the stage that stores it; None for what every rank has, and for what is not decided yet."""
        return self.layout.stage

    def whole(self, shape: tf.TensorShape) -> tf.TensorShape:
        """Returns the shape of all rows, given the shape of those that are here."""
        return shape if self.rows is None else tf.TensorShape([self.extent, *shape[1:]])


@dataclasses.dataclass
class Survey:
    """All that is reachable from a root now.

    Args:
        items: items by key, in a stable order.
        has_models: whether there is any distributed model.
        unfinished: paths of models whose variables do not all have an owner yet.
        optimizers: path of every optimizer, and whether it has been built for variables of this rank.
        found_at: every optimizer, by its path.
        waiting: paths of optimizers that have not made their slots yet.
        orphans: (path of the optimizer, number of slots' variables that cannot be reached from the root).
        other_shares: paths of optimizers whose slots are of another share than this rank would have now.
        reached: the objects that the walk has reached; None where there was no walk.
    """

    items: dict[str, Item] = dataclasses.field(default_factory=dict)
    has_models: bool = False
    unfinished: list[str] = dataclasses.field(default_factory=list)
    optimizers: dict[str, bool] = dataclasses.field(default_factory=dict)
    found_at: dict[str, Any] = dataclasses.field(default_factory=dict)
    waiting: list[str] = dataclasses.field(default_factory=list)
    orphans: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    other_shares: list[str] = dataclasses.field(default_factory=list)
    reached: Reached | None = None

    def again(self) -> Survey:
        """Returns a new survey of the same objects, and of what their optimizers have made since."""
        if self.reached is None:
            return self
        with tf.init_scope():
            self.reached.follow_optimizers()
            return _Report(self.reached).found

    def key_of(self) -> dict[int, str]:
        """Returns the key of every variable, by `id` of its handle."""
        return {id(i.target.handle): key for key, i in self.items.items() if i.kind is not StateKind.STATE}


def variable_of_slot(key: str) -> str:
    """Returns the key of the variable that a slot's key belongs to, or the key itself where it is no slot's."""
    return key.partition(_SLOT)[0]


def state_of(target: Any, part: str) -> tf.Tensor:
    """Returns the value of one part of an object's state."""
    state = tf_internals.object_state(target)
    return state[part]


def survey(root: Any) -> Survey:
    """Walks everything that is reachable from a root by attributes that TensorFlow tracks.

    Args:
        root: a `tf.train.Checkpoint` or another trackable object.

    Returns:
        What was found.
    """
    with tf.init_scope():
        return _Report(Reached(root)).found


class Reached:
    """The objects that are reachable from a root, in the order in which a walk has reached them.

    Args:
        root: where the walk begins.
    """

    def __init__(self, root: Any) -> None:
        #: For each object: its path, the object, and the optimizer (by path) and the model that it belongs to.
        #: Optimizers are not among them.
        self.objects: list[tuple[str, Any, str, SplitModel | None]] = []
        self.optimizers: list[tuple[str, Any]] = []
        self.models: list[tuple[str, SplitModel]] = []
        self._seen: dict[int, Any] = {}
        self._handles: set[int] = set()
        self._walk([("", root, "", None)])

    def follow_optimizers(self) -> None:
        """Adds what optimizers have made since, such as the counters that older ones make at their first use."""
        for path, optimizer in list(self.optimizers):
            children = adapter.slots().children(optimizer)
            self._walk((_joined(path, name), child, path, None) for name, child in children.items())

    def _walk(self, begin: Iterable[tuple[str, Any, str, SplitModel | None]]) -> None:
        left = deque(begin)
        while left:
            path, value, optimizer, model = left.popleft()
            if id(value) in self._seen:
                continue
            self._seen[id(value)] = value  # keeps it alive, so that its id stays unique
            if isinstance(value, tf.Variable):
                if id(value.handle) not in self._handles:
                    self._handles.add(id(value.handle))
                    self.objects.append((path, value, optimizer, model))
                continue
            if adapter.layers().is_metric(value):
                model = None  # a metric is the script's own, even in a model
            if adapter.slots().is_optimizer(value):
                optimizer, model = path, None
                self.optimizers.append((path, value))
                tracked = adapter.slots().children(value)
            else:
                self.objects.append((path, value, optimizer, model))
                tracked = tf.train.TrackableView.children(value)
            if is_distributed(value):
                model = value
                self.models.append((path, value))
            if isinstance(value, tf.train.Checkpoint):
                # It names the object that it wraps twice, once in private.
                tracked = {name: child for name, child in tracked.items() if name != "_root"}
            left.extend((_joined(path, name), child, optimizer, model) for name, child in tracked.items())


class _Report:
    """Makes the survey of objects.

    Args:
        reached: the objects.
    """

    def __init__(self, reached: Reached) -> None:
        unfinished = [path for path, model in reached.models if not _is_settled(model)]
        self.found = Survey(has_models=bool(reached.models), unfinished=unfinished, reached=reached)
        for path, value, optimizer, model in reached.objects:
            if isinstance(value, tf.Variable):
                self._add_variable(path, value, optimizer, model)
            else:
                self._add_state(path, value, optimizer)
        self._add_slots(reached.optimizers)

    def _add_variable(self, path: str, variable: Any, optimizer: str, model: SplitModel | None) -> None:
        store = store_of(variable)
        state = store.state(variable) if store is not None else None
        if state is not None:
            layout = state.storage.layout
            is_here = layout.stage is not None and state.has_value
            item = Item(path, StateKind.MODEL, variable, layout, is_here, spread=layout.value)
        elif model is not None and not _is_settled(model) and not model._smp_store.leaves_to_script(variable):
            # It was built before it was wrapped. Every rank has it until it is decided who keeps it.
            item = Item(path, StateKind.MODEL, variable, is_here=False)
        else:
            item = Item(path, StateKind.OPTIMIZER if optimizer else StateKind.SCRIPT, variable, optimizer=optimizer)
        self.found.items[path] = item

    def _add_state(self, path: str, value: Any, optimizer: str) -> None:
        for part in sorted(tf_internals.object_state(value)):
            key = f"{path}{_STATE}{part}"
            self.found.items[key] = Item(key, StateKind.STATE, value, optimizer=optimizer, part=part)

    def _add_slots(self, optimizers: Iterable[tuple[str, Any]]) -> None:
        reachable = [item for item in self.found.items.values() if item.kind is not StateKind.STATE]
        item_of = {id(item.target): item for item in reachable}
        seen: set[int] = set()
        for path, optimizer in optimizers:
            inner = adapter.slots().innermost(optimizer)
            if id(inner) in seen:
                continue
            seen.add(id(inner))
            self.found.optimizers[path] = optimizer_reports.has_slots(optimizer)
            self.found.found_at[path] = optimizer
            if not optimizer_reports.is_ready(optimizer):
                self.found.waiting.append(path)
            with_slots: set[int] = set()
            for variable, name, slot in adapter.slots().slots(optimizer, [item.target for item in reachable]):
                of = item_of[id(variable)]
                with_slots.add(id(variable))
                spread = layouts.slots_of(variable, optimizer)
                if not of.layout.is_updated_at(spread, layouts.here()):
                    # The optimizer was built before the model was wrapped. Nothing changes its slots here.
                    continue
                key = f"{of.key}{_SLOT}{path}/{_escaped(name)}"
                self.found.items[key] = _item_of_slot(key, slot, of, path, spread)
            of_model = any(item_of[found].kind is StateKind.MODEL for found in with_slots)
            if of_model and shares.shares_of(inner) != layouts.count():
                self.found.other_shares.append(path)
            count = adapter.slots().count_of_variables(optimizer)
            if count is not None and adapter.slots().has_slot_lists(optimizer) and len(with_slots) < count:
                self.found.orphans.append((path, count - len(with_slots)))


def _item_of_slot(key: str, slot: Any, of: Item, path: str, spread: Spread) -> Item:
    """Returns the item of a slot that is here, given the item of its variable."""
    variable = of.target
    rows = spread.rows_at(layouts.here())
    item = Item(key, StateKind.SLOT, slot, of.layout, True, path, spread)
    # What an optimizer keeps for a weight in another shape, such as a number, is not of its rows.
    if rows is None or slot.shape != [rows[1] - rows[0], *variable.shape[1:]]:
        return item
    return dataclasses.replace(item, rows=rows, extent=variable.shape[0])


def _is_settled(model: SplitModel) -> bool:
    """Returns whether it is decided who stores a model's variables."""
    if not model.built or model._smp_store.is_new:
        return False
    return len(model._smp_store) > 0 or not model.variables


def _joined(path: str, name: str) -> str:
    return f"{path}/{_escaped(name)}" if path else _escaped(name)


def _escaped(name: str) -> str:
    return str(name).replace(".", "..").replace("/", ".S")
