"""Gives the variables of models to the stages, and their slots to the replicas, once a plan says where they are.

A variable that the step does not use is kept by one stage, and no later step has to go by that:

    fit of one head        head_a ─▶ stage 1      head_b is kept there, too
    predict of both        head_b ─▶ stage 0      its value travels once; stage 1 frees it
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from smp_tf.checkpoint import pending
from smp_tf.job import runtime
from smp_tf.job.channel import tag_of
from smp_tf.partition.graph.fingerprint import form
from smp_tf.partition.mesh import CommGroup
from smp_tf.partition.split.split import Split
from smp_tf.partition.trace.lower import Lowered
from smp_tf.replicas.reduce_scatter import Receiver
from smp_tf.sharding import layouts, moved_slots, shares
from smp_tf.sharding.receivers import Applied, agreed_receivers, note_receivers, receivers_in
from smp_tf.variables import assigned_values, fetch
from smp_tf.variables import store as variables
from smp_tf.variables.models import SplitModel


@dataclass(frozen=True, eq=False)
class Ownership:
    """Which variables a rank has, and who receives their gradients.

    Args:
        placed: variables whose owner was decided now, each with the stage that stores it.
        variables: those whose handles this rank may use, by index in the op graph.
        receivers: by output, who alone gets a gradient's sum over the replicas, or rows of it; the others go to all.
        applied: which gradients the step gives to an optimizer and to nobody else.
    """

    placed: list[tuple[Any, int]]
    variables: Mapping[int, tf.Variable]
    receivers: Mapping[int, Receiver]
    applied: Sequence[Applied]


class AgreedReceivers:
    """Who receives the gradients of a step's outputs, as all replicas have agreed when they came to its form first.

    Replicas come to each form together, and to programs for other batches one by one.

    Args:
        step: its name, for messages.
    """

    def __init__(self, step: str) -> None:
        self._step = step
        self._by_form: dict[tuple[str, ...], Mapping[int, Receiver]] = {}

    def of(self, cut: Split, lowered: Lowered, applied: Sequence[Applied] | None) -> Mapping[int, Receiver]:
        """Returns, by output, who alone gets a gradient's sum, or rows of it; the others go to all.

        Args:
            cut: the step, cut.
            lowered: what was read off its trace.
            applied: which gradients the step gives to an optimizer and to nobody else; None where a script does.
        """
        if not cut.graph.gradients or not layouts.are_received_apart():
            return {}
        kind = form(cut.graph)
        if kind not in self._by_form:
            with tf.init_scope():
                own = receivers_in(cut, runtime.current().topology.stage, lowered.variables, applied)
                self._by_form[kind] = agreed_receivers(own, self._step)
            note_receivers(cut, lowered.variables, self._by_form[kind], applied or ())
        return self._by_form[kind]


def decide_owners(
    models: Iterable[SplitModel],
    lowered: Lowered,
    owners: Sequence[int | None],
    chunks: Sequence[int],
    stage: int,
    seed: int,
    trained: Collection[int],
) -> list[tuple[Any, int]]:
    """Tells every model who owns its variables, and replicas who updates those that the step has gradients of.

    This rank's get their initial values now.

    Args:
        models: those that the step uses.
        lowered: its graph.
        owners: chunk of each of the graph's variables; None for what no model has, and for what no op uses.
        chunks: the stage of every chunk.
        stage: that of this rank.
        seed: for random initial values where TensorFlow has no global seed.
        trained: the graph's variables that have a gradient.

    Returns:
        The variables of which that was decided now, each with the stage that stores it.

    Raises:
        StepError: an optimizer's slots cannot follow a variable to another rank.
    """
    by_handle = {id(v.handle): owners[index] for index, v in enumerate(lowered.variables)}
    to_place: list[tuple[variables.VariableStore, dict[int, int]]] = []
    for model in models:
        store = model._smp_store
        by_position = {}
        for variable in store:
            owner = by_handle.get(id(variable.handle))
            state = store.state(variable)
            if owner is not None and state is not None:
                by_position[state.position] = owner
        to_place.append((store, by_position))
    new: dict[int, tuple[Any, int]] = {}
    for store, owned in to_place:
        for variable, to in store.to_settle(owned, chunks):
            # Two models may share it; the first one decides.
            new.setdefault(id(variable.handle), (variable, to))
    placed = list(new.values())
    states = [(v, state) for store, _ in to_place for v in store if (state := store.state(v)) is not None]
    first = [(v, to) for v, to in placed if variables.stage_of(v) is None]
    keepers = [(v, variables.stage_of(v), to) for v, to in placed]
    moved = [(v, keeper, to) for v, keeper, to in keepers if keeper not in (None, to)]
    known = [(v, state.owner) for v, state in states if state.is_decided]
    handles = {id(lowered.variables[index].handle) for index in trained}
    shares.share(v for v, owner in [*known, *placed] if owner == stage and id(v.handle) in handles)
    restored = pending.values_for(first)
    with assigned_values.unnoted():
        for store, by_position in to_place:
            store.settle(by_position, stage, seed, restored, chunks, _moved)
        _move_slots(moved)
        pending.take_what_exists()
    return placed


_KEPT = tag_of("kept weight")


def _moved(variable: Any, keeper: int, owner: int) -> tf.Tensor | None:
    """Brings the value of a variable from the stage that has kept it to its owner, which gets it; None elsewhere."""
    topology = runtime.current().topology
    ranks = topology.members(CommGroup.PP_GROUP)
    with tf.init_scope():
        if topology.rank == ranks[keeper]:
            fetch.transport().send_bytes(ranks[owner], _KEPT, fetch.as_bytes(variable))
        elif topology.rank == ranks[owner]:
            return fetch.as_tensor(fetch.transport().recv_bytes(ranks[keeper], _KEPT), variable)
    return None


def _move_slots(moved: Iterable[tuple[Any, int, int]]) -> None:
    """Lets optimizers' slots follow variables that were moved.

    Args:
        moved: variables, each with the stage that has kept it and the one that stores it now.
    """
    topology = runtime.current().topology
    ranks = topology.members(CommGroup.PP_GROUP)
    with tf.init_scope():
        for variable, keeper, owner in moved:
            if topology.rank == ranks[keeper]:
                moved_slots.send(variable, ranks[owner])
            elif topology.rank == ranks[owner]:
                moved_slots.receive(variable, ranks[keeper])
