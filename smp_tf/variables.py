"""Variables of a distributed model: made on every rank without storage, filled on the rank that owns them.

    trace (every rank)            plan                    first step
    DeferredVariable ──────▶ owner: stage 1 ──┬─▶ rank of stage 1: initial value assigned
    (handle, shape, no bytes)                 └─▶ other ranks: stays empty, reading it is an error

Keras initializers draw their seed when they are first called, and TensorFlow's random ops when they are made. Every
initializer is therefore called once, in creation order, in a graph that is thrown away: seeds are drawn as in one
process, whoever fills which variable later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from smp_tf import foreign_values, last_given, tf_internals
from smp_tf.errors import OwnershipError


@dataclasses.dataclass
class Placement:
    """Who stores a variable: one and the same for all models that use it.

    Args:
        owner: its stage; None before the plan.
        chunk: the chunk of that stage that it belongs to.
        chunks: the stage of every chunk, in the plan that has decided this.
        is_kept: whether no step has used the variable so far: its owner only keeps it, until a step that uses it
            decides who stores it.
        is_local: whether this rank stores it; meaningful once owner is known.
        is_filled: whether it has a value here.
        replica: the replica that keeps the optimizer's slots for it, where this rank's stage stores it and replicas
            share them; None where all keep them.
        rows: where its slots may be cut: the borders of the rows that the replicas keep; see `slot_shares.Share`.
        block: a variable that has this replica's rows, from when they were first updated; it counts as this one.
        replicas: among how many that was decided.
        number: the start of smp_tf in which that was decided, and of how many variables before.
        goes_to_all: whether a step has given a gradient of it to other replicas than that one, too.
    """

    owner: int | None = None
    chunk: int | None = None
    chunks: tuple[int, ...] | None = None
    is_kept: bool = False
    is_local: bool = False
    is_filled: bool = False
    replica: int | None = None
    rows: tuple[int, ...] | None = None
    block: tf.Variable | None = None
    replicas: int = 1
    number: tuple[int, int] = (0, 0)
    goes_to_all: bool = False


@dataclasses.dataclass
class VariableState:
    """What smp_tf knows about one variable of a distributed model.

    Args:
        name: unique name within the model, such as "net/dense/kernel".
        initial_value: makes the initial value; None for a variable that was built with its value.
        op_seeds: the seeds that TensorFlow's random ops in the initial value have drawn, in the order of the ops.
        position: how many variables of the model were created before it.
        placement: who stores it; shared with the other models that use the variable.
    """

    name: str
    initial_value: Callable[[], tf.Tensor] | None
    op_seeds: tuple[tf_internals.OpSeeds, ...]
    position: int
    placement: Placement = dataclasses.field(default_factory=Placement)

    @property
    def owner(self) -> int | None:
        """The stage that stores the variable; None before the plan."""
        return self.placement.owner

    @property
    def chunk(self) -> int | None:
        """The chunk that it belongs to; None before the plan."""
        return self.placement.chunk

    @property
    def is_decided(self) -> bool:
        """Whether a step that uses the variable has decided who stores it."""
        return self.owner is not None and not self.placement.is_kept

    @property
    def is_local(self) -> bool:
        """Whether this rank stores it; meaningful once its owner is known."""
        return self.placement.is_local

    @property
    def is_filled(self) -> bool:
        """Whether it has a value here."""
        return self.placement.is_filled


class _Tracing(threading.local):
    depth = 0
    made_at_once = False


_tracing = _Tracing()


@contextlib.contextmanager
def tracing_step() -> Iterator[None]:
    """Within this context graphs may read variables without storage: nothing runs, a graph is being written."""
    before = _tracing.depth
    _tracing.depth = before + 1
    try:
        yield
    finally:
        _tracing.depth = before


@contextlib.contextmanager
def made_at_once() -> Iterator[None]:
    """Within this context models make variables with their value, for code that uses them before there is a plan."""
    before = _tracing.made_at_once
    _tracing.made_at_once = True
    try:
        yield
    finally:
        _tracing.made_at_once = before


def _check_readable(variable: Any, doing: str) -> None:
    state: VariableState = variable.smp_state
    if state.is_filled or (_tracing.depth and not tf.executing_eagerly()):
        return
    if state.owner is None:
        raise OwnershipError(
            f"Cannot {doing} variable {state.name!r} yet: which rank stores it is decided at the first call of a step, "
            f"and it has no value before. Do this after the first step, or in a hook registered with "
            f"smp.register_post_partition_hook."
        )
    raise OwnershipError(
        f"Cannot {doing} variable {state.name!r} here: partition {state.owner} owns it and only its rank stores it. "
        f"Use model.local_variables for the variables this rank stores."
    )


def _check_fits(variable: Any, value: Any) -> None:
    shape = value.shape if hasattr(value, "shape") else tf.convert_to_tensor(value, variable.dtype).shape
    if not variable.shape.is_compatible_with(shape):
        raise ValueError(
            f"Cannot assign a value of shape {tuple(shape)} to variable {variable.smp_state.name!r} of shape "
            f"{tuple(variable.shape)}."
        )


def _check_saved(variable: Any) -> None:
    # While the structure of a model is written its values are left out on purpose.
    state: VariableState = variable.smp_state
    if state.is_filled or _tracing.depth:
        return
    if state.owner is None:
        _check_readable(variable, "save or restore")
    raise OwnershipError(
        f"Cannot save or restore variable {state.name!r} here: partition {state.owner} owns it and only its rank "
        f"stores it, so a checkpoint of this rank would lack it. smp.CheckpointManager(checkpoint, directory), used on "
        f"every rank, saves and restores the variables of all partitions."
    )


def _take_from_checkpoint(variable: Any, value: tf.Tensor) -> bool:
    """Note what TensorFlow reads from a checkpoint for a variable that nobody stores yet: its initial value.

    That is how Keras's `load_model` and `load_weights` give a model its values that is built by a function, or in the
    constructor of a subclass.
    """
    if variable.smp_state.is_filled or variable.smp_state.owner is not None:
        return False
    _check_fits(variable, value)
    return set_initial_value(variable, foreign_values.later(value, variable.dtype))


_Checked: Any = tf_internals.checked_in_checkpoints(_check_saved, _take_from_checkpoint)


class _Guarded(_Checked):
    """What a variable of a distributed model does before it is read or written: check that this rank stores it."""

    smp_state: VariableState

    def _read_variable_op(self, *args: Any, **kwargs: Any) -> Any:
        fetch = foreign_values.fetch()
        if fetch is not None and not self.smp_state.is_filled and tf.executing_eagerly():
            return fetch(self)
        _check_readable(self, "read")
        return super()._read_variable_op(*args, **kwargs)

    def sparse_read(self, *args: Any, **kwargs: Any) -> Any:
        """As `tf.Variable.sparse_read`; an error on a rank that does not store the variable."""
        _check_readable(self, "read")
        return super().sparse_read(*args, **kwargs)

    def gather_nd(self, *args: Any, **kwargs: Any) -> Any:
        """As `tf.Variable.gather_nd`; an error on a rank that does not store the variable."""
        _check_readable(self, "read")
        return super().gather_nd(*args, **kwargs)

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """As `tf.Variable.assign`; an error on a rank that does not store the variable.

        Before it is decided who stores it, the value takes the place of the initial one.
        """
        if not self.smp_state.is_filled and tf.executing_eagerly():
            if self.smp_state.owner is None:
                _check_fits(self, value)
                set_initial_value(self, foreign_values.later(value, self.dtype))
                return self
            if foreign_values.leaves_out():
                _check_fits(self, value)
                return self
        _check_readable(self, "assign to")
        return super().assign(foreign_values.as_array(value), *args, **kwargs)

    def assign_add(self, *args: Any, **kwargs: Any) -> Any:
        """As `tf.Variable.assign_add`; an error on a rank that does not store the variable."""
        _check_readable(self, "assign to")
        return super().assign_add(*args, **kwargs)

    def assign_sub(self, *args: Any, **kwargs: Any) -> Any:
        """As `tf.Variable.assign_sub`; an error on a rank that does not store the variable."""
        _check_readable(self, "assign to")
        return super().assign_sub(*args, **kwargs)


def _guard_scatters() -> None:
    """Give `_Guarded` the many ways of writing parts of a variable, each checked before it runs."""

    def guarded(name: str) -> Callable[..., Any]:
        def write(self: Any, *args: Any, **kwargs: Any) -> Any:
            _check_readable(self, "assign to")
            return getattr(super(_Guarded, self), name)(*args, **kwargs)

        write.__name__ = name
        write.__doc__ = f"As `tf.Variable.{name}`; an error on a rank that does not store the variable."
        return write

    for name in dir(tf_internals.ResourceVariable):
        if name.startswith(("scatter_", "batch_scatter_")):
            setattr(_Guarded, name, guarded(name))


_guard_scatters()


class DeferredVariable(_Guarded, tf_internals.UninitializedVariable):
    """A resource variable whose storage appears only on the rank that owns it.

    Args:
        state: what smp_tf knows about it.
        kwargs: as `tf.Variable` takes them, without an initial value.
    """

    def __init__(self, state: VariableState, **kwargs: Any) -> None:
        self.smp_state = state
        super().__init__(**kwargs)


class FreedVariable(_Guarded, tf_internals.ResourceVariable):
    """A variable that was built with its value, on a rank that does not own it: freed once the plan existed."""


class VariableStore:
    """The variables of one distributed model, in creation order.

    Args:
        model_name: for messages and unique names.
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
        #: What share of these it takes while the other ranks of the host wait.
        self.alone: tuple[float, float] = (1.0, 1.0)

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[tf.Variable]:
        return iter(self._variables.values())

    @property
    def is_new(self) -> bool:
        """Whether it is still to be decided who stores these variables."""
        return any(state.owner is None for state in self._states.values())

    def is_placed(self, variable: Any) -> bool:
        """Whether it is decided who stores a variable of this model."""
        return self._states[id(variable.handle)].owner is not None

    def state(self, variable: Any) -> VariableState | None:
        """What is known about a variable, or about the one whose block it is; None where it is not this model's."""
        return self._states.get(id(whole_of(variable).handle))

    def leave_to_script(self, variables: Iterable[tf.Variable]) -> None:
        """Leave variables that the model holds, such as those of metrics, to the script: every rank stores them."""
        for variable in variables:
            if self.state(variable) is None:
                self._of_script[id(variable.handle)] = variable

    def leaves_to_script(self, variable: Any) -> bool:
        """Whether a variable that the model holds is the script's own."""
        return id(variable.handle) in self._of_script

    def adopt(self, variable: tf.Variable) -> None:
        """Take in a variable that was built with its value, or that belongs to another model as well.

        Whichever model runs a step first decides who stores what they share.
        """
        if self.state(variable) is not None or self.leaves_to_script(variable):
            return
        position, name = len(self._states), self._unique(variable.name)
        first = store_of(variable)
        known = first.state(variable) if first is not None else None
        if known is not None:
            self._add(variable, dataclasses.replace(known, name=name, position=position), also=True)
        else:
            self._add(variable, VariableState(name, None, (), position, Placement(is_filled=True)))

    def creator(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        """A variable creator (see `tf.variable_creator_scope`) that makes variables without storage.

        Variables whose initial value is given as a value rather than a function (step counters and the like) are made
        with it: whoever has the value at hand holds it already. Those that turn out to be weights are adopted later.
        Variables without any are what a SavedModel holds beside layers that Keras builds anew, such as the state of an
        optimizer; TensorFlow reads their values at once.
        """
        if kwargs.get("initial_value") is None:
            return next_creator(**kwargs)
        initial_value = kwargs.pop("initial_value")
        if not callable(initial_value) or _tracing.made_at_once:
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
        """Take over the variables of another store, behind one's own."""
        for variable in other:
            state = other._states[id(variable.handle)]
            state.position = len(self._states)
            self._add(variable, state)

    def _add(self, variable: Any, state: VariableState, also: bool = False) -> None:
        """Note a variable as this model's, or as also this one's."""
        self._states[id(variable.handle)] = state
        self._variables[id(variable.handle)] = variable
        earlier = _stores_of.get(id(variable.handle), ()) if also else ()
        _stores_of[id(variable.handle)] = (*earlier, weakref.ref(self))

    def _unique(self, name: str) -> str:
        base = name.partition(":")[0]
        unique, number = base, 1
        while unique in self._names:
            unique, number = f"{base}_{number}", number + 1
        self._names.add(unique)
        return unique

    def require_cut(self, partitions: int, stage: int) -> None:
        """Raise where the model was cut in another way, by a configuration that `smp.shutdown` has ended.

        Args:
            partitions: number of partitions.
            stage: the one that this rank runs.

        Raises:
            OwnershipError: it was; what this rank stores is not what it would have to.
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

    def to_settle(self, owners: dict[int, int], chunks: Sequence[int] | None = None) -> list[tuple[tf.Variable, int]]:
        """The variables that `settle` would decide about, each with the stage that will store it.

        Args:
            owners: as for `settle`.
            chunks: as for `settle`.
        """
        return [(variable, chunk if chunks is None else chunks[chunk]) for variable, _, chunk in self._to_place(owners)]

    def _to_place(self, owners: dict[int, int]) -> list[tuple[tf.Variable, VariableState, int]]:
        """The variables that a step decides about, or that nobody keeps yet, each with its chunk.

        A variable that the step does not use is kept where the one that was made before it is: a layer behind the
        others then is where data reaches it.
        """
        found, chunk = [], 0
        for variable in self:
            state = self._states[id(variable.handle)]
            if not state.is_decided and state.position in owners:
                chunk = owners[state.position]
                found.append((variable, state, chunk))
            elif state.owner is None:
                found.append((variable, state, chunk))
            elif state.is_decided and state.chunk is not None:
                chunk = state.chunk
        return found

    def settle(
        self,
        owners: dict[int, int],
        stage: int,
        seed: int,
        restored: Callable[[tf.Variable], tf.Tensor | None] = lambda variable: None,
        chunks: Sequence[int] | None = None,
        move: Callable[[tf.Variable, int, int], tf.Tensor | None] = lambda variable, giver, taker: None,
    ) -> None:
        """Decide who stores what: fill the variables of this stage, free what was built and belongs elsewhere.

        Args:
            owners: chunk of each variable that the step uses, by position in creation order. Somebody keeps the others
                until a step that uses them decides.
            stage: the stage of this rank.
            seed: for random ops in initial values where TensorFlow has no global seed.
            restored: gives the value that a variable of this stage is to have instead of its initial one, or None.
            chunks: the stage of every chunk; None where each is a stage of its own.
            move: brings the value of a variable from the stage that has kept it to the one that is to store it, where
                it gives the value.
        """
        with tf.init_scope():
            while self._before_settling:
                self._before_settling.pop(0)()
        for variable, state, chunk in self._to_place(owners):
            placement, keeper = state.placement, state.owner
            placement.chunk = chunk
            placement.chunks = None if chunks is None else tuple(chunks)
            placement.owner = chunk if chunks is None else chunks[chunk]
            placement.is_kept = state.position not in owners
            placement.is_local = placement.owner == stage
            if keeper is not None and keeper != placement.owner:
                given = move(variable, keeper, placement.owner)
                if given is not None:
                    placement.is_filled = True
                    tf_internals.make_storage(variable, given)
            value = restored(variable) if keeper is None and state.is_local else None
            if value is not None:
                placement.is_filled = True
                with tf.init_scope():
                    variable.assign(value, read_value=False)
            elif state.is_local and not state.is_filled:
                self._fill(variable, state, seed)
            elif not state.is_local and state.is_filled:
                tf_internals.destroy_storage(variable)
                placement.is_filled = False
                if type(variable) is tf_internals.ResourceVariable:
                    # The script and Keras hold this very object; from now on it checks who reads it.
                    variable.smp_state = state
                    variable.__class__ = FreedVariable
            # It may hold a value that was assigned, of which other ranks need nothing.
            state.initial_value = None

    def before_settling(self, load: Callable[[], None]) -> None:
        """Have a function run when all variables are there and it is about to be decided who stores them.

        Values that it gives to variables count as given now.
        """
        moment = last_given.now()

        def put_off() -> None:
            with last_given.as_of(moment):
                load()

        self._before_settling.append(put_off)

    def fill(self, variable: Any, seed: int) -> None:
        """Give a variable its initial value before the plan; ranks that turn out not to own it free it then.

        Args:
            variable: one of the model's variables.
            seed: as for `settle`.
        """
        state = self._states[id(variable.handle)]
        if state.owner is None and not state.is_filled:
            self._fill(variable, state, seed)

    def _fill(self, variable: Any, state: VariableState, seed: int) -> None:
        assert state.initial_value is not None
        with tf.init_scope(), warnings.catch_warnings():
            # The initializer was called once before, for its seed; Keras warns of a second call.
            warnings.filterwarnings("ignore", message=".*unseeded and being called multiple times.*")
            if state.op_seeds:
                value = _with_drawn_seeds(state.initial_value, state.op_seeds, seed, state.position)
            else:
                value = tf.convert_to_tensor(state.initial_value(), dtype=variable.dtype)
            state.placement.is_filled = True
            variable.assign(value, read_value=False)


#: The stores of a variable, by its handle: that of the model it was made in first.
_stores_of: dict[int, tuple[weakref.ref[VariableStore], ...]] = {}


def whole_of(variable: Any) -> Any:
    """The variable whose rows another one stands for; that itself where it stands for none."""
    return getattr(variable, "smp_whole", variable)


def of_models() -> list[tf.Variable]:
    """The variables of all distributed models."""
    stores = {id(store): store for found in _stores_of.values() for ref in found if (store := ref()) is not None}
    return [variable for store in stores.values() for variable in store]


def store_of(variable: Any) -> VariableStore | None:
    """The store of the distributed model a variable belongs to; None for a variable of the script's own."""
    for found in _stores_of.get(id(whole_of(variable).handle), ()):
        store = found()
        if store is not None and store.state(variable) is not None:
            return store
    return None


def set_initial_value(variable: Any, value: Callable[[], Any]) -> bool:
    """Replace what a variable will start with, if it is not decided yet who stores it.

    Args:
        variable: any variable.
        value: gives the value; called on the rank that will store it.

    Returns:
        Whether that is so; a variable that has a value is to be assigned to.
    """
    state = getattr(variable, "smp_state", None)
    if state is None or state.is_filled or state.owner is not None:
        return False
    state.initial_value, state.op_seeds = value, ()
    last_given.note(variable)
    return True


def stage_of(variable: Any) -> int | None:
    """The stage that stores a variable of a distributed model, or keeps it; None before a plan, and for any other."""
    store = store_of(variable)
    state = store.state(variable) if store is not None else None
    return None if state is None else state.owner


def keep_for_good(variables: Iterable[Any]) -> None:
    """Decide that variables which no step has used stay where they are kept; all ranks do it together.

    Args:
        variables: any variables.
    """
    for variable in variables:
        store = store_of(variable)
        state = store.state(variable) if store is not None else None
        if state is not None and state.owner is not None:
            state.placement.is_kept = False


def is_remote(variable: Any) -> bool:
    """Whether a variable belongs to a distributed model and another rank stores it."""
    store = store_of(variable)
    if store is None:
        return False
    state = store.state(variable)
    return state is not None and state.owner is not None and not state.is_local


def make_script_variable(**kwargs: Any) -> tf.Variable:
    """A variable of the script's own, made at once and outside any graph, whatever creator scopes are open.

    Args:
        kwargs: what a variable creator is given.
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
    """Call an initializer in a graph that is thrown away: its seeds are drawn now, and its shape is known."""
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
    """An initial value from TensorFlow's random ops, which get the seeds they drew when the variable was made.

    Ops with equal seeds of their own give equal values here, on whatever rank; executed eagerly in one process, the
    second would go on where the first stopped.
    """

    def made() -> tf.Tensor:
        left = enumerate(op_seeds)

        def give(op_seed: int | None) -> tf_internals.OpSeeds:
            number, seeds = next(left)
            # Ranks that fill the same variable must agree on its value, also without a global seed.
            return seeds if seeds != (None, None) else (seed % (1 << 31), position * 1000 + number)

        with tf_internals.op_seeds_from(give):
            return tf.convert_to_tensor(initial_value())

    return tf.function(made, autograph=False)()
