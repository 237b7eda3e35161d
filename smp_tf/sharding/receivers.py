"""Decides which replica receives the average of a gradient, or which rows of it: the one that updates the weight.

a step's gradients     replica 0      replica 1
of kernel              average        -              replica 0 updates it
of table, in fit       rows 0 to 48   rows 49 to 99  each updates its rows
of table, in a loop    average        average        the script may look at it
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from smp_tf.job import runtime
from smp_tf.job.exchange import allgather_json
from smp_tf.keras.optimizer_methods import has_own_apply
from smp_tf.partition.graph.op_graph import Tensor
from smp_tf.partition.mesh import CommGroup
from smp_tf.partition.split.split import Split
from smp_tf.partition.spread import EVERYWHERE, SplitOver, Whole, spread_from_json, spread_to_json
from smp_tf.pipeline.run.reduction import Gradients
from smp_tf.replicas.reduce_scatter import Receiver
from smp_tf.replicas.sums import IN_PARTS
from smp_tf.sharding import layouts
from smp_tf.variables import store


def owners_of_shape(tensor: tf.Tensor) -> set[int]:
    """Returns the replicas of this rank's stage that alone update a weight with a tensor's shape and type."""
    if not layouts.are_shared() or not tensor.shape.is_fully_defined():
        return set()
    alike = [v for v in store.of_models() if v.dtype == tensor.dtype and v.shape == tensor.shape]
    place = layouts.here()
    known = [layout for v in alike if (layout := layouts.layout_of(v)).is_here(place)]
    return {layout.slots.only for layout in known if layout.slots.only is not None}


@dataclass(frozen=True)
class Applied:
    """A gradient that a step returns and applies itself, so that nothing else looks at it.

    Args:
        position: position among the step's outputs.
        optimizer: the optimizer of Keras that is given the gradient.
        variable: the variable that it is the gradient of.
    """

    position: int
    optimizer: Any
    variable: Any


def receivers_in(
    split: Split, stage: int, handled: Sequence[Any], applied: Iterable[Applied] | None = None
) -> dict[int, Receiver]:
    """Returns which replica alone gets the average of a gradient, or which rows each gets: who updates the weight.

    Args:
        split: a cut step.
        stage: of this rank.
        handled: TensorFlow's variables, by index in the step's graph.
        applied: gradients that the step itself applies. Then other gradients that it returns are only looked at, as
            logs are, and go to all. None where a script applies them.

    Returns:
        The receivers by position among the step's outputs. Gradients that all replicas get are left out. With
        gradient_offload, these are all of them. Else they are what the step has made from a gradient, or from several
        weights, and returns.
    """
    if not layouts.are_received_apart():
        return {}
    graph = split.graph
    variable_of: dict[Tensor, Any] = {}
    of_several: set[Tensor] = set()
    for gradient in graph.gradients:
        for tensor in gradient.tensors:
            # The gradient of a sum of weights is one tensor for all of them.
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
    """Returns who updates a weight by what a step gives its optimizer as the gradient, whatever it was made from."""
    variable = applied.variable
    if not layouts.layout_of(variable).is_here(layouts.here()) or not variable.shape.is_compatible_with(shape):
        return None
    slots = layouts.slots_of(variable, applied.optimizer)
    if isinstance(slots, SplitOver):
        return Receiver(slots, variable.shape.num_elements())
    return _whole(variable)


def _whole(variable: Any) -> Receiver | None:
    """Returns the one replica that gets the gradient of a variable, which it updates; None where all get it."""
    layout = layouts.layout_of(variable)
    if not layout.is_here(layouts.here()) or not isinstance(layout.slots, Whole) or layout.slots.only is None:
        return None
    return Receiver(layout.slots, variable.shape.num_elements())


def note_receivers(
    split: Split, handled: Sequence[Any], found: Collection[int], applied: Iterable[Applied] = ()
) -> None:
    """Notes which weights have gradients that a step gives to more than one replica, so that they may be anywhere.

    All ranks note the same for the weights of all stages.

    Args:
        split: a cut step.
        handled: TensorFlow's variables, by index in the step's graph.
        found: positions of the outputs that not all replicas of a stage receive, as agreed over all stages.
        applied: gradients that the step itself applies.
    """
    variable_of = {
        tensor: handled[gradient.variable] for gradient in split.graph.gradients for tensor in gradient.tensors
    }
    given_to = {one.position: one.variable for one in applied}
    to_all = {o.tensor for position, o in enumerate(split.outputs) if o.is_gradient and position not in found}
    # It is unknown from which gradients a step has made a result.
    makes_others = not to_all.issubset(variable_of)
    given = {id(variable_of[tensor].handle) for tensor in to_all & variable_of.keys()}
    alone = {id((given_to[p] if p in given_to else variable_of[split.outputs[p].tensor]).handle) for p in found}
    for variable in variable_of.values():
        is_known_alone = id(variable.handle) in alone - given
        if layouts.layout_of(variable).slots.only is not None and (makes_others or not is_known_alone):
            storage = store.storage_of(variable)
            storage.put(dataclasses.replace(storage.layout, gradient=EVERYWHERE))


def agreed_receivers(own: Mapping[int, Receiver], step: str) -> tuple[dict[int, Receiver], set[int]]:
    """Returns the receivers that all replicas of this rank's stage have found. All ranks call it together.

    Which gradients are one tensor may depend on the batch. For example, the gradients of two rows that are added to the
    batch are one tensor where the batch has one row, and not where it has several.

    Args:
        own: the result of `receivers_in`.
        step: name of the step, for messages.

    Returns:
        The receivers that all have, by position; and the positions for which all replicas of some stage have the same.
    """
    spreads = sorted((position, spread_to_json(receiver.spread)) for position, receiver in own.items())
    said = allgather_json(spreads, name=f"who receives the gradients of step {step!r}")
    heard = [{p: spread_from_json(spread, "gradient") for p, spread in theirs} for theirs in said]
    mesh, rank = runtime.current().topology.mesh, runtime.current().topology.rank

    def agreed(group: Iterable[int]) -> set[int]:
        """Returns the positions about which the ranks of a group say the same."""
        first, *others = (heard[member] for member in group)
        return {p for p, spread in first.items() if all(other.get(p) == spread for other in others)}

    here = agreed(mesh.members(CommGroup.RDP_GROUP, rank))
    everywhere = set().union(*map(agreed, mesh.groups(CommGroup.RDP_GROUP)))
    return {p: receiver for p, receiver in own.items() if p in here}, everywhere


def known_gradients(found: Mapping[int, Receiver], applied: Iterable[Applied]) -> Gradients:
    """Returns what is known of the gradients of a step.

    Args:
        found: receivers of the gradients.
        applied: gradients that the step itself applies.
    """
    replica = runtime.current().topology.replica
    return Gradients(
        frozenset(p for p, receiver in found.items() if not receiver.gets(replica)),
        {one.position: store.nbytes_of(one.variable) for one in applied if one.variable.shape.is_fully_defined()},
    )
