"""Each replica keeps a share of its stage's optimizer slots, updates those weights, and the others take the values.

    stage's weights    replica 0                                    replica 1
    kernel             average ─ slots, update ── new value ──────▶ takes it
    bias               takes it ◀─────────────── new value ──────── average ─ slots, update
    embedding          average ─ slots, update ── its rows ───────▶ takes them
                       takes them ◀───────────── its rows ───────── average ─ slots, update

Shares are of equal bytes (`slot_shares`): of whole weights, and of rows of those that would make them unequal. Only the
replica that updates a weight receives the average of its gradient (`sums_at_receivers`); on the others it is None, as
the gradient of another stage's weight is. Of one that is cut each receives the average for its rows where the step
itself applies it, as in `fit`. Where a script does, the average goes to all: it may look at gradients, and what some
rows of it are is nothing that a list of gradients can say. An optimizer is handed the weights of this rank's share
(`optimizer_patch`), or blocks with the rows of them (`row_blocks`), and makes slots for no others. One that cannot
update rows by themselves updates the whole weight, on one replica. What it has written is then gathered
(`gathered_shares`).

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC20, sections 5.1
and 5.2 (slots are shared, and averages of gradients; sums over microbatches are not).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from smp_tf.announce import announce
from smp_tf.errors import StepError
from smp_tf.job import runtime
from smp_tf.job.exchange import allgather_json
from smp_tf.job_state import JobState
from smp_tf.keras import optimizer_slots
from smp_tf.keras.optimizer_methods import has_own_apply
from smp_tf.partition.graph.op_graph import Tensor
from smp_tf.partition.mesh import CommGroup
from smp_tf.partition.place.slot_shares import Sized, share_out
from smp_tf.partition.split.split import Split
from smp_tf.pipeline.run.reduction import Gradients
from smp_tf.replicas.reduce_scatter import Receiver, Rows, Whole
from smp_tf.replicas.sums import IN_PARTS
from smp_tf.variables import store as variables
from smp_tf.variables.state import Placement

#: Among how many replicas the slots of optimizers are shared, from when they were first built.
_shares_of: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class _State:
    """What is counted while variables are shared out."""

    def __init__(self) -> None:
        #: Variables that were shared out: ranks that are replicas now may have been other stages in an earlier job.
        self.count = 0
        #: Bytes whose slots each replica was to keep so far: counted, since models end when Python has the time for it.
        self.loads: list[float] = [0.0] * count()


_state = JobState(_State)


def are_shared() -> bool:
    """Whether the replicas share the optimizer's slots among them."""
    running = runtime.current_or_none()
    return running is not None and running.config.shard_optimizer_state and running.topology.replicas > 1


def are_received_apart() -> bool:
    """Whether replicas receive the averages of other gradients than each other: those of weights that they update."""
    # On the host they are summed in equal parts, which shares are not.
    return are_shared() and not runtime.current().config.gradient_offload


def count() -> int:
    """Among how many replicas slots are shared; 1 where all keep them."""
    return runtime.current().topology.replicas if are_shared() else 1


def shares_of(optimizer: Any) -> int:
    """Among how many replicas the slots of an optimizer are shared: as many as when this was first asked."""
    return _shares_of.setdefault(optimizer, count())


def share(placed: Iterable[Any]) -> None:
    """Decide which replica keeps the slots of variables that this rank stores, and that a step has gradients of.

    What was decided for as many replicas stays, also after `smp.shutdown`: optimizers have slots by it.

    Args:
        placed: variables of models, the same in the same order on every replica.
    """
    if not are_shared():
        return
    replicas = count()
    # Several models may use one. One whose shape is open has no size by which to share it out: all replicas update it.
    known = {id(v.handle): v for v in placed if v.shape.is_fully_defined()}
    todo = [variable for variable in known.values() if placement_of(variable).replicas != replicas]
    state = _state()
    # A constraint may go by columns, as that of a norm does.
    sized = [Sized(_nbytes(v), v.shape[0] if v.shape.rank and v.constraint is None else 1) for v in todo]
    shares, state.loads[:] = share_out(sized, state.loads)
    for variable, share_of_it in zip(todo, shares, strict=True):
        placement = placement_of(variable)
        placement.replica, placement.rows, placement.replicas = share_of_it.replica, share_of_it.rows, replicas
        placement.goes_to_all = False
        # It is of other rows than now.
        placement.block = None
        placement.number = runtime.starts(), state.count
        state.count += 1


def require_rows_as_before(optimizer: Any, updated: Iterable[Any]) -> None:
    """Say of which variables that are too large for a share an optimizer makes slots as a whole.

    Args:
        optimizer: of Keras.
        updated: variables, of which this rank stores some.

    Raises:
        StepError: it looks at whole variables now, and has made slots of rows.
    """
    # Those that stand for rows come from an apply that has looked at the whole ones.
    whole = (variable for variable in updated if variables.whole_of(variable) is variable)
    may_be_cut = [v for v in whole if (placement := _shared_placement(v)) is not None and placement.rows is not None]
    if not may_be_cut:
        return
    inner, names = optimizer_slots.innermost(optimizer), ", ".join(variable.name for variable in may_be_cut)
    name = type(inner).__name__
    if not optimizer_slots.updates_rows(inner):
        why = f"{name} updates weights as a whole, not rows by themselves"
    elif getattr(inner, "clipnorm", None):
        raise StepError(
            f"clipnorm of this {name} was set after its first use. With shard_optimizer_state each replica updates "
            f"rows of {names}, and the norm is that of the whole. Give clipnorm to the optimizer when it is made, or "
            f"global_clipnorm."
        )
    elif any(optimizer_slots.has_whole_slots(inner, variable) for variable in may_be_cut):
        why = f"{name} has made slots of whole weights before it was known that replicas share them"
    else:
        return
    announce(
        f"{why}: with shard_optimizer_state one replica keeps all slots of {names}, and more than its share.",
        runtime.current().topology.replica,
    )


def is_updated_elsewhere(variable: Any, optimizer: Any) -> bool:
    """Whether other replicas keep an optimizer's slots of a variable, and update it, and this one does not.

    Args:
        variable: any variable.
        optimizer: of Keras; None where it is not known.
    """
    if (rows := rows_here(variable, optimizer)) is not None:
        return rows[0] == rows[1]
    replica = replica_of(variable, optimizer)
    return replica is not None and replica != runtime.current().topology.replica


def rows_here(variable: Any, optimizer: Any) -> tuple[int, int] | None:
    """The rows of a variable whose slots this replica keeps, where they are cut; None where they are not.

    Args:
        variable: any variable.
        optimizer: of Keras, which has the slots; None where it is not known.
    """
    placement = _shared_placement(variable)
    if placement is None or placement.rows is None or not _updates_rows(optimizer, variable):
        return None
    replica = runtime.current().topology.replica
    return placement.rows[replica], placement.rows[replica + 1]


def replica_of(variable: Any, optimizer: Any) -> int | None:
    """The replica that keeps all slots of a variable which this rank stores; None where all do, or several parts.

    Args:
        variable: any variable.
        optimizer: of Keras, which has the slots; None where it is not known.
    """
    placement = _shared_placement(variable)
    if placement is None or (placement.rows is not None and (optimizer is None or _updates_rows(optimizer, variable))):
        return None
    return placement.replica


def _updates_rows(optimizer: Any, variable: Any) -> bool:
    """Whether an optimizer updates rows of a variable that may be cut: it can, and has no slots of the whole."""
    if optimizer is None or not optimizer_slots.updates_rows(optimizer):
        return False
    return not optimizer_slots.has_whole_slots(optimizer, variables.whole_of(variable))


def receiver_of(variable: Any) -> int | None:
    """The replica that alone gets the gradient of a variable which this rank stores; None where all do."""
    placement = _shared_placement(variable)
    return placement.replica if placement is not None and placement.rows is None else None


def goes_to_all(variable: Any) -> bool:
    """Whether replicas share the slots of a variable, and a step gives its gradient to all of them, or may do so."""
    placement = _shared_placement(variable)
    if placement is None:
        return False
    return placement.rows is not None or placement.goes_to_all or not are_received_apart()


def owners_of_shape(tensor: tf.Tensor) -> set[int]:
    """The replicas that alone update a weight of the shape and type of a tensor, among those of this rank's stage."""
    if not are_shared() or not tensor.shape.is_fully_defined():
        return set()
    alike = [v for v in variables.of_models() if v.dtype == tensor.dtype and v.shape == tensor.shape]
    return {replica for v in alike if (replica := receiver_of(v)) is not None}


@dataclass(frozen=True)
class Applied:
    """A gradient that a step returns and applies itself, so that nobody else looks at it.

    Args:
        position: among the step's outputs.
        optimizer: of Keras, which is given it.
        variable: of which.
    """

    position: int
    optimizer: Any
    variable: Any


def receivers(
    split: Split, stage: int, handled: Sequence[Any], applied: Iterable[Applied] | None = None
) -> dict[int, Receiver]:
    """Which replica alone gets the average of a gradient, or which rows each gets: the one that updates the weight.

    Args:
        split: a cut step.
        stage: of this rank.
        handled: TensorFlow's variables, by index in the step's graph.
        applied: gradients that the step itself applies: then others that it returns are looked at alone, as logs are,
            and go to all. None where a script applies them.

    Returns:
        Who receives it, by position among the step's outputs; gradients that all replicas get are left out: with
        gradient_offload all of them, and what the step has made of a gradient, or of several weights, and returns.
    """
    if not are_received_apart():
        return {}
    graph = split.graph
    variable_of: dict[Tensor, Any] = {}
    of_several: set[Tensor] = set()
    for gradient in graph.gradients:
        for tensor in gradient.tensors:
            # That of a sum of weights is one tensor for all of them.
            if variable_of.setdefault(tensor, handled[gradient.variable]) is not handled[gradient.variable]:
                of_several.add(tensor)
    by_position = {one.position: one for one in applied or ()}
    found: dict[int, Receiver] = {}
    for position, output in enumerate(split.outputs):
        kind = graph.type_of(output.tensor)
        if not output.gets_sum(stage, split.placement) or tf.as_dtype(kind.dtype) not in IN_PARTS:
            continue
        if applied is not None and position not in by_position:
            continue
        receiver: Receiver | None = None
        if position in by_position and not has_own_apply(by_position[position].optimizer):
            # It needs a gradient only where it updates the weight.
            receiver = _receiver_of_applied(by_position[position], kind.shape)
        elif output.tensor in variable_of and output.tensor not in of_several and split.stage_of(output) == stage:
            receiver = _whole(variable_of[output.tensor])
        if receiver is not None:
            found[position] = receiver
    return found


def _receiver_of_applied(applied: Applied, shape: tuple[int | None, ...] | None) -> Receiver | None:
    """Who updates a weight by what a step gives its optimizer as the gradient, whatever that was made of."""
    variable = applied.variable
    placement = _shared_placement(variable)
    if placement is None or not variable.shape.is_compatible_with(shape):
        return None
    if placement.rows is None or rows_here(variable, applied.optimizer) is None:
        return _whole(variable)
    return Rows(tuple(placement.rows), variable.shape[1:].num_elements())


def _whole(variable: Any) -> Whole | None:
    """The one replica that gets the gradient of a variable; None where all do."""
    replica = receiver_of(variable)
    return None if replica is None else Whole(replica, variable.shape.num_elements())


def note_receivers(
    split: Split, handled: Sequence[Any], found: Mapping[int, Receiver], applied: Iterable[Applied] = ()
) -> None:
    """Note which weights have gradients that a step gives to more than one replica, so that one may be anywhere.

    Args:
        split: a cut step.
        handled: TensorFlow's variables, by index in the step's graph.
        found: its receivers, as agreed.
        applied: gradients that the step itself applies.
    """
    variable_of = {
        tensor: handled[gradient.variable] for gradient in split.graph.gradients for tensor in gradient.tensors
    }
    given_to = {one.position: one.variable for one in applied}
    to_all = {o.tensor for position, o in enumerate(split.outputs) if o.is_gradient and position not in found}
    # Of what a step has made of gradients it is not known of which.
    makes_others = not to_all.issubset(variable_of)
    given = {id(variable_of[tensor].handle) for tensor in to_all & variable_of.keys()}
    alone = {id((given_to[p] if p in given_to else variable_of[split.outputs[p].tensor]).handle) for p in found}
    for variable in variable_of.values():
        is_known_alone = id(variable.handle) in alone - given
        if receiver_of(variable) is not None and (makes_others or not is_known_alone):
            placement_of(variable).goes_to_all = True


def agreed_receivers(own: Mapping[int, Receiver], step: str) -> dict[int, Receiver]:
    """The receivers that all replicas of this rank's stage have found; all of them call it together.

    Which gradients are one tensor may depend on the batch: those of two rows that are added to a batch of one row are,
    where to one of several rows they are not.

    Args:
        own: of `receivers`.
        step: name of the step, for messages.

    Returns:
        By position, the receivers that all have.
    """
    name = f"who receives the gradients of step {step!r}"
    in_words = {p: [r.replica] if isinstance(r, Whole) else list(r.borders) for p, r in own.items()}
    said = allgather_json(sorted(in_words.items()), CommGroup.RDP_GROUP, name=name)
    found = [{position: words for position, words in other} for other in said]
    return {p: receiver for p, receiver in own.items() if all(o.get(p) == in_words[p] for o in found)}


def gradients(found: Mapping[int, Receiver], applied: Iterable[Applied]) -> Gradients:
    """What is known of the gradients of a step.

    Args:
        found: their receivers.
        applied: those that the step itself applies.
    """
    replica = runtime.current().topology.replica
    return Gradients(
        frozenset(p for p, receiver in found.items() if isinstance(receiver, Whole) and receiver.replica != replica),
        {one.position: _nbytes(one.variable) for one in applied if one.variable.shape.is_fully_defined()},
    )


def of_shares() -> set[int]:
    """The slots that no other replica of this rank's stage has, by `id` of their handles."""
    if not are_shared():
        return set()
    shared = [variable for variable in variables.of_models() if _shared_placement(variable) is not None]
    return {
        id(slot.handle)
        for optimizer in optimizer_slots.in_use()
        for _, _, slot in optimizer_slots.slots(optimizer, shared)
    }


def _nbytes(variable: Any) -> int:
    count: int = variable.shape.num_elements()
    return count * int(variable.dtype.size)


def _shared_placement(variable: Any) -> Placement | None:
    """Who updates a variable that this rank stores; None where all replicas do."""
    if not are_shared() or variables.store_of(variable) is None:
        return None
    placement = placement_of(variable)
    return placement if placement.replicas == count() and placement.replica is not None else None


def placement_of(variable: Any) -> Placement:
    """Who stores a variable of a distributed model, and who updates it."""
    store = variables.store_of(variable)
    state = store.state(variable) if store is not None else None
    assert state is not None
    return state.placement
