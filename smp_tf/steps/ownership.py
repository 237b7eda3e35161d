"""Gives the variables of models to the stages, and their slots to the replicas, once a plan says where they are.

Every rank decides the same for every variable, also for those of other stages: one `Layout` each. From then on, this
layout says who has the variable, who receives its gradient and who updates it.

One stage keeps a variable that the step does not use. Later steps need not follow that:

    fit of one head        head_a ─▶ stage 1      head_b is kept there, too
    predict of both        head_b ─▶ stage 0      its value travels once; stage 1 frees it
"""

from __future__ import annotations

import dataclasses
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
from smp_tf.variables.decision import Decision
from smp_tf.variables.models import SplitModel
from smp_tf.variables.store import Stored, VariableStore


@dataclass(frozen=True, eq=False)
class Ownership:
    """Which variables a rank has, and who receives their gradients.

    Args:
        decided: the variables whose places were decided now.
        variables: those whose handles this rank may use, by index in the op graph.
        receivers: who alone gets a gradient's sum over the replicas, or rows of it, by output. The others go to all.
        applied: which gradients the step gives to an optimizer and to nobody else.
    """

    decided: Sequence[Decision]
    variables: Mapping[int, tf.Variable]
    receivers: Mapping[int, Receiver]
    applied: Sequence[Applied]


class AgreedReceivers:
    """Who receives the gradients of a step's outputs, as all replicas agreed when they first came to the step's form.

    Replicas come to each form together, and to programs for other batches one by one.

    Args:
        step: name of the step, for messages.
    """

    def __init__(self, step: str) -> None:
        self._step = step
        self._by_form: dict[tuple[str, ...], Mapping[int, Receiver]] = {}

    def of(self, cut: Split, lowered: Lowered, applied: Sequence[Applied] | None) -> Mapping[int, Receiver]:
        """Returns who alone gets a gradient's sum, or rows of it, by output. The others go to all.

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
                self._by_form[kind], of_all_stages = agreed_receivers(own, self._step)
            note_receivers(cut, lowered.variables, of_all_stages, applied or ())
        return self._by_form[kind]


def decide_owners(
    models: Iterable[SplitModel],
    lowered: Lowered,
    owners: Sequence[int | None],
    chunks: Sequence[int],
    seed: int,
    trained: Collection[int],
) -> list[Decision]:
    """Decides where models' variables are, and which replica updates those that the step has gradients of.

    All ranks decide the same for all variables. Those of this rank get their initial values now.

    Args:
        models: the models that the step uses.
        lowered: the step's graph.
        owners: chunk of each of the graph's variables; None for variables of no model, and for unused ones.
        chunks: the stage of every chunk.
        seed: the seed for random initial values where TensorFlow has no global seed.
        trained: the graph's variables that have a gradient.

    Returns:
        The decisions that were made now.

    Raises:
        StepError: an optimizer's slots cannot follow a variable to another rank.
    """
    by_handle = {id(v.handle): owners[index] for index, v in enumerate(lowered.variables)}
    to_place: list[tuple[VariableStore, dict[int, int]]] = []
    for model in models:
        store = model._smp_store
        by_position = {}
        for variable in store:
            owner = by_handle.get(id(variable.handle))
            state = store.state(variable)
            if owner is not None and state is not None:
                by_position[state.position] = owner
        to_place.append((store, by_position))
    new: dict[int, Decision] = {}
    of_store: list[list[int]] = []
    for store, owned in to_place:
        # Two models may share a variable. The first one decides.
        found = {id(d.variable.handle): d for d in store.decisions(owned, chunks) if id(d.variable.handle) not in new}
        new.update(found)
        of_store.append(list(found))
    trains = {id(lowered.variables[index].handle) for index in trained}
    decided = _with_slots(_earlier(store for store, _ in to_place), new, trains)
    place = runtime.current().topology.place
    restored = pending.values_for([decision for decision in decided.values() if decision.is_first])
    with assigned_values.unnoted():
        for (store, _), handles in zip(to_place, of_store, strict=True):
            store.settle([decided[handle] for handle in handles], place, seed, restored, chunks, _moved)
        _move_slots(decision for decision in decided.values() if decision.moves)
        pending.take_what_exists()
    return list(decided.values())


def _earlier(stores: Iterable[VariableStore]) -> list[tuple[Any, Stored]]:
    """Returns the variables whose places earlier steps have decided, with what is known of each."""
    states = [(v, state) for store in stores for v in store if (state := store.state(v)) is not None]
    return [(v, state.storage) for v, state in states if state.is_decided]


def _with_slots(
    earlier: Sequence[tuple[Any, Stored]], new: Mapping[int, Decision], trains: Collection[int]
) -> dict[int, Decision]:
    """Decides which replicas keep the slots of trained variables, and adds that to the decisions.

    Args:
        earlier: variables whose places are decided. What is decided about their slots is noted.
        new: the decisions of this step, by `id` of the variable's handle.
        trains: the variables whose gradients the step takes, by `id` of their handles.
    """
    wanted = [(v, stored.layout) for v, stored in earlier] + [(d.variable, d.layout) for d in new.values()]
    layouts = shares.share((v, layout) for v, layout in wanted if id(v.handle) in trains)
    for variable, stored in earlier:
        stored.put(layouts.get(id(variable.handle), stored.layout))
    return {key: dataclasses.replace(d, layout=layouts.get(key, d.layout)) for key, d in new.items()}


_KEPT = tag_of("kept weight")


def _moved(decision: Decision) -> tf.Tensor | None:
    """Brings the value of a variable from the stage that has kept it to the one that stores it."""
    giver, taker = _movers(decision)
    topology, variable = runtime.current().topology, decision.variable
    with tf.init_scope():
        if decision.before.is_here(topology.place):
            fetch.transport().send_bytes(taker, _KEPT, fetch.as_bytes(variable))
        elif decision.layout.is_here(topology.place):
            return fetch.as_tensor(fetch.transport().recv_bytes(giver, _KEPT), variable)
    return None


def _move_slots(moved: Iterable[Decision]) -> None:
    """Moves optimizers' slots with the variables that were moved."""
    place = runtime.current().topology.place
    with tf.init_scope():
        for decision in moved:
            giver, taker = _movers(decision)
            if decision.before.is_here(place):
                moved_slots.send(decision.variable, taker)
            elif decision.layout.is_here(place):
                moved_slots.receive(decision.variable, giver)


def _movers(decision: Decision) -> tuple[int, int]:
    """Returns the ranks of this replica that a variable moves between, from the first to the second."""
    ranks = runtime.current().topology.members(CommGroup.PP_GROUP)
    assert decision.before.stage is not None, "a stage has kept it"
    assert decision.layout.stage is not None, "a stage stores it"
    return ranks[decision.before.stage], ranks[decision.layout.stage]
