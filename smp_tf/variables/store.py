"""Variables of a distributed model: made on every rank without storage, filled on the rank that owns them.

    trace (every rank)            plan                    first step
    DeferredVariable ──────▶ owner: stage 1 ──┬─▶ rank of stage 1: initial value assigned
    (handle, shape, no bytes)                 └─▶ other ranks: stays empty, reading it is an error

Keras's initializers draw their seeds when they are first called, and TensorFlow's random ops when they are made. So
every initializer is called once, in creation order, in a graph that is thrown away. Then seeds are those of one
process, whichever rank fills which variable later.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from smp_tf import tf_internals
from smp_tf.errors import OwnershipError
from smp_tf.partition.layout import Layout
from smp_tf.partition.spread import Place
from smp_tf.variables import guarded, precedence
from smp_tf.variables.decision import Decision
from smp_tf.variables.guarded import BuiltVariable, DeferredVariable
from smp_tf.variables.state import Stored, VariableState


class VariableStore:
    """The variables of one distributed model, in creation order.

    Args:
        model_name: name of the model, for messages and unique names.
    """

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self._states: dict[int, VariableState] = {}
        self._variables: dict[int, tf.Variable] = {}
        self._of_script: dict[int, tf.Variable] = {}
        self._names: set[str] = set()
        self._before_settling: list[Callable[[], None]] = []
        self._cut: tuple[int, int] | None = None
        #: What `model.profile` measured: seconds forward and backward for one sample, by unit.
        self.measured: dict[str, tuple[float, float]] = {}
        #: The share of these times that a unit takes while the other ranks of the host wait.
        self.alone: tuple[float, float] = (1.0, 1.0)
        #: The processor's seconds for a message between two ranks of a host, and for every byte, if they were measured.
        self.message: tuple[float, float] | None = None
        #: How many more bytes units need forward and backward than is estimated, by unit, if they were counted; and the
        #: samples that they were counted with.
        self.beyond: dict[str, tuple[int, int]] = {}
        self.beyond_samples = 0

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[tf.Variable]:
        return iter(self._variables.values())

    @property
    def is_new(self) -> bool:
        """Returns whether it is not decided yet who stores these variables."""
        return any(state.owner is None for state in self._states.values())

    def undecided(self) -> list[tuple[tf.Variable, Layout]]:
        """Returns the variables that nobody stores yet by any decision, each with what is known of its layout."""
        states = ((variable, self._states[id(variable.handle)]) for variable in self)
        return [(variable, state.storage.layout) for variable, state in states if state.owner is None]

    def is_placed(self, variable: Any) -> bool:
        """Returns whether it is decided who stores a variable of this model."""
        return self._states[id(variable.handle)].owner is not None

    def state(self, variable: Any) -> VariableState | None:
        """Returns what is known about a variable, or about the one whose block it is; None for another model's."""
        return self._states.get(id(whole_of(variable).handle))

    def leave_to_script(self, variables: Iterable[tf.Variable]) -> None:
        """Leaves variables that the model holds, such as those of metrics, to the script: every rank stores them."""
        for variable in variables:
            if self.state(variable) is None:
                self._of_script[id(variable.handle)] = variable

    def leaves_to_script(self, variable: Any) -> bool:
        """Returns whether a variable that the model holds is the script's own."""
        return id(variable.handle) in self._of_script

    def adopt(self, variable: tf.Variable) -> None:
        """Takes a variable that was built with its value, or that belongs to another model as well.

        The model that runs a step first decides who stores the variables that they share.
        """
        if self.state(variable) is not None or self.leaves_to_script(variable):
            return
        position, name = len(self._states), self._unique(variable.name)
        first = store_of(variable)
        known = first.state(variable) if first is not None else None
        if known is not None:
            self._add(variable, dataclasses.replace(known, name=name, position=position), also=True)
        else:
            self._add(variable, VariableState(name, None, (), position, Stored(has_value=True)))

    def creator(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        """Returns a variable creator, for `tf.variable_creator_scope`, that makes variables without storage.

        A variable whose initial value is given as a value and not as a function (such as a step counter) is made with
        it, since whoever gives the value holds it already. If it turns out to be a weight, it is adopted later.
        Variables without an initial value are those of a SavedModel besides layers that Keras builds anew, such as the
        state of an optimizer. TensorFlow reads their values at once.
        """
        if kwargs.get("initial_value") is None:
            return next_creator(**kwargs)
        initial_value = kwargs.pop("initial_value")
        if not callable(initial_value) or guarded.is_made_at_once():
            return make_script_variable(initial_value=initial_value, **kwargs)
        shape, dtype, op_seeds = _draw_seeds(initial_value)
        wanted = kwargs.get("dtype")
        arguments = _resource_arguments(kwargs)
        arguments["dtype"] = tf.as_dtype(wanted) if wanted is not None else dtype
        arguments["shape"] = kwargs["shape"] if kwargs.get("shape") is not None else shape
        state = VariableState("", initial_value, op_seeds, len(self._states))
        variable = DeferredVariable(state, **arguments)
        state.name = self._unique(variable.name)
        self._add(variable, state)
        return variable

    def extend(self, other: VariableStore) -> None:
        """Takes the variables of another store, after this store's own."""
        for variable in other:
            state = other._states[id(variable.handle)]
            state.position = len(self._states)
            self._add(variable, state)

    def _add(self, variable: Any, state: VariableState, also: bool = False) -> None:
        """Notes that a variable is this model's, or this model's as well."""
        self._states[id(variable.handle)] = state
        self._variables[id(variable.handle)] = variable
        earlier = _stores_of.get(id(variable.handle), ()) if also else ()
        _stores_of[id(variable.handle)] = (*earlier, _reference(self, id(variable.handle)))

    def _unique(self, name: str) -> str:
        base = name.partition(":")[0]
        unique, number = base, 1
        while unique in self._names:
            unique, number = f"{base}_{number}", number + 1
        self._names.add(unique)
        return unique

    def require_cut(self, partitions: int, stage: int) -> None:
        """Raises an error where an earlier configuration, ended by `smp.shutdown`, has cut the model in another way.

        Args:
            partitions: number of partitions.
            stage: the stage that this rank runs.

        Raises:
            OwnershipError: it has, so this rank does not store what it would have to.
        """
        if self._cut not in (None, (partitions, stage)) and any(s.owner is not None for s in self._states.values()):
            assert self._cut is not None
            raise OwnershipError(
                f"Model {self.model_name!r} was cut into {self._cut[0]} partitions before smp.shutdown, and this rank "
                f"stores the weights of partition {self._cut[1]}. Now there are {partitions}, and it runs partition "
                f"{stage}. Make a new model, and give it the weights with save_weights before smp.shutdown and "
                f"load_weights afterwards, or with smp.CheckpointManager."
            )
        self._cut = partitions, stage

    def decisions(self, owners: dict[int, int], chunks: Sequence[int] | None = None) -> list[Decision]:
        """Returns what a step decides: where the variables are that it uses first, and those that nobody keeps yet.

        A variable that the step does not use is kept with the variable that was made before it. So a layer after the
        others is where its data comes from.

        Args:
            owners: chunk of each variable that the step uses, by position in creation order.
            chunks: the stage of every chunk; None where each is a stage of its own.
        """
        found, chunk = [], 0
        for variable in self:
            state = self._states[id(variable.handle)]
            is_used, layout = state.position in owners, state.storage.layout
            if is_used and not state.is_decided:
                chunk = owners[state.position]
            elif state.owner is not None and not state.storage.is_early:
                if state.is_decided and state.chunk is not None:
                    chunk = state.chunk
                continue
            stage = chunk if chunks is None else chunks[chunk]
            decided = dataclasses.replace(layout, stage=stage, chunk=chunk)
            found.append(Decision(variable, decided, layout, is_used))
        return found

    def settle(
        self,
        decided: Iterable[Decision],
        place: Place,
        seed: int,
        restored: Callable[[tf.Variable], tf.Tensor | None] = lambda variable: None,
        chunks: Sequence[int] | None = None,
        move: Callable[[Decision], tf.Tensor | None] = lambda decision: None,
    ) -> None:
        """Does what was decided: fills the variables that are here, frees what was built and belongs elsewhere.

        Args:
            decided: what `decisions` gave, of this model.
            place: coordinates of this rank.
            seed: for random ops in initial values where TensorFlow has no global seed.
            restored: gives the value that a variable is to have here instead of its initial one, or None.
            chunks: the stage of every chunk; None where each is a stage of its own.
            move: brings the value of a variable from the stage that has kept it to the stage that will store it, and
                returns it there.
        """
        with tf.init_scope():
            while self._before_settling:
                self._before_settling.pop(0)()
        for decision in decided:
            variable, state = decision.variable, self._states[id(decision.variable.handle)]
            storage, is_here = state.storage, decision.layout.is_here(place)
            storage.number = next(_numbers) if storage.number is None else storage.number
            storage.put(decision.layout)
            storage.chunks = None if chunks is None else tuple(chunks)
            storage.is_kept, storage.is_early = not decision.is_used, decision.is_early
            if decision.moves:
                given = move(decision)
                if given is not None:
                    storage.has_value = True
                    tf_internals.make_storage(variable, given)
            value = restored(variable) if decision.is_first and is_here else None
            if value is not None:
                storage.has_value = True
                with tf.init_scope():
                    variable.assign(value, read_value=False)
            elif is_here and not state.has_value:
                self._fill(variable, state, seed)
            elif not is_here and state.has_value:
                tf_internals.destroy_storage(variable)
                storage.has_value = False
            if type(variable) is tf_internals.ResourceVariable and _is_of_several(decision, chunks, place):
                # The script and Keras hold this object itself. From now on it checks reads, and notes assignments.
                variable.smp_state = state
                tf_internals.turn_into(variable, BuiltVariable)
            # It may hold an assigned value that other ranks do not need.
            state.initial_value = None

    def before_settling(self, load: Callable[[], None]) -> None:
        """Registers a function that runs when all variables exist, just before it is decided who stores them.

        Values that it gives to variables count as given now.
        """
        moment = precedence.now()

        def put_off() -> None:
            with precedence.as_of(moment):
                load()

        self._before_settling.append(put_off)

    def fill(self, variable: Any, seed: int) -> None:
        """Gives a variable its initial value before the plan. Ranks that do not own it free it when that is decided.

        Args:
            variable: one of the model's variables.
            seed: for random ops in initial values where TensorFlow has no global seed.
        """
        state = self._states[id(variable.handle)]
        if state.owner is None and not state.has_value:
            self._fill(variable, state, seed)

    def _fill(self, variable: Any, state: VariableState, seed: int) -> None:
        assert state.initial_value is not None
        with tf.init_scope(), warnings.catch_warnings():
            # The initializer was called once before, for its seed. Keras warns about a second call.
            warnings.filterwarnings("ignore", message=".*unseeded and being called multiple times.*")
            if state.op_seeds:
                value = _with_drawn_seeds(state.initial_value, state.op_seeds, seed, state.position)
            else:
                value = tf.convert_to_tensor(state.initial_value(), dtype=variable.dtype)
            state.storage.has_value = True
            variable.assign(value, read_value=False)


def _is_of_several(decision: Decision, chunks: Sequence[int] | None, place: Place) -> bool:
    """Returns whether the plan has several stages, as far as one variable's rank can tell."""
    return len({*(chunks or ()), decision.layout.stage, place["P"]}) > 1


_numbers = itertools.count()

#: The stores of a variable, by its handle. That of the model in which it was made comes first.
_stores_of: dict[int, tuple[weakref.ref[VariableStore], ...]] = {}


def _reference(store: VariableStore, handle: int) -> weakref.ref[VariableStore]:
    """Returns a reference that is removed from `_stores_of` when the store ends."""

    def forget(ended: weakref.ref[VariableStore], known: dict[int, Any] = _stores_of) -> None:
        # Another variable may have the number by now.
        left = tuple(reference for reference in known.pop(handle, ()) if reference is not ended)
        if left:
            known[handle] = left

    return weakref.ref(store, forget)


def whole_of(variable: Any) -> Any:
    """Returns the variable whose rows a variable stands for, or the variable itself where it stands for none."""
    return getattr(variable, "smp_whole", variable)


def of_models() -> list[tf.Variable]:
    """Returns the variables of all distributed models."""
    stores = {id(store): store for found in _stores_of.values() for ref in found if (store := ref()) is not None}
    return [variable for store in stores.values() for variable in store]


def store_of(variable: Any) -> VariableStore | None:
    """Returns the store of the model that a variable belongs to; None for a variable of the script's own."""
    for found in _stores_of.get(id(whole_of(variable).handle), ()):
        store = found()
        if store is not None and store.state(variable) is not None:
            return store
    return None


def stage_of(variable: Any) -> int | None:
    """Returns the stage that stores a variable of a distributed model, or keeps it; None before a plan."""
    store = store_of(variable)
    state = store.state(variable) if store is not None else None
    return None if state is None else state.owner


def nbytes_of(variable: Any) -> int:
    """Returns the bytes of a variable's value.

    Args:
        variable: a variable whose shape is known.
    """
    count: int = variable.shape.num_elements()
    return count * int(variable.dtype.size)


def storage_of(variable: Any) -> Stored:
    """Returns what is known of the storage of a variable of a distributed model.

    Args:
        variable: one of a model's variables, or one that stands for rows of it.
    """
    store = store_of(variable)
    state = store.state(variable) if store is not None else None
    assert state is not None, "it is a model's"
    return state.storage


def keep_for_good(variables: Iterable[Any]) -> None:
    """Decides that variables which no step has used stay where they are kept. All ranks do so together.

    Args:
        variables: any variables.
    """
    for variable in variables:
        store = store_of(variable)
        state = store.state(variable) if store is not None else None
        if state is not None and state.owner is not None:
            state.storage.is_kept = state.storage.is_early = False


def is_remote(variable: Any) -> bool:
    """Returns whether a variable belongs to a distributed model and another rank stores it."""
    store = store_of(variable)
    if store is None:
        return False
    state = store.state(variable)
    return state is not None and state.is_elsewhere


def make_script_variable(**kwargs: Any) -> tf.Variable:
    """Returns a variable of the script's own, made at once, outside any graph and past all creator scopes.

    Args:
        kwargs: the arguments of a variable creator.
    """
    return tf_internals.make_plain_variable(initial_value=kwargs.get("initial_value"), **_resource_arguments(kwargs))


_RESOURCE_ARGUMENTS = (
    "trainable", "caching_device", "name", "constraint", "synchronization", "aggregation", "shape", "dtype",
)  # fmt: skip


def _resource_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: kwargs[key] for key in _RESOURCE_ARGUMENTS if kwargs.get(key) is not None}


def _draw_seeds(
    initial_value: Callable[[], Any],
) -> tuple[tf.TensorShape, tf.DType, tuple[tf_internals.OpSeeds, ...]]:
    """Calls an initializer in a graph that is thrown away, so that its seeds are drawn and its shape is known."""
    drawn: list[tf_internals.OpSeeds] = []

    def draw(op_seed: int | None) -> tf_internals.OpSeeds:
        drawn.append(tf_internals.draw_op_seeds(op_seed))
        return drawn[-1]

    with tf.init_scope():
        graph = tf_internals.scratch_graph("initial_value")
        with graph.as_default(), tf_internals.op_seeds_from(draw):
            value = tf.convert_to_tensor(initial_value())
    return value.shape, value.dtype, tuple(drawn)


def _with_drawn_seeds(
    initial_value: Callable[[], Any], op_seeds: tuple[tf_internals.OpSeeds, ...], seed: int, position: int
) -> tf.Tensor:
    """Returns an initial value from random ops with the seeds that they drew when the variable was made.

    Ops with equal own seeds give equal values here, on any rank. If they ran eagerly in one process, the second would
    go on where the first stopped.
    """

    def made() -> tf.Tensor:
        left = enumerate(op_seeds)

        def give(op_seed: int | None) -> tf_internals.OpSeeds:
            number, seeds = next(left)
            # Ranks that fill the same variable must agree on its value, even without a global seed.
            return seeds if seeds != (None, None) else (seed % (1 << 31), position * 1000 + number)

        with tf_internals.op_seeds_from(give):
            return tf.convert_to_tensor(initial_value())

    return tf.function(made, autograph=False)()
