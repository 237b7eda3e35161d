"""Gives the variables of models to the stages, and their slots to the replicas, once a plan says where they are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from smp_tf import pending_restore, sharded_slots, variables
from smp_tf.model import DistributedModel
from smp_tf.partition.lower import Lowered


def settle(
    models: Iterable[DistributedModel],
    lowered: Lowered,
    owners: Sequence[int | None],
    chunks: Sequence[int],
    stage: int,
    seed: int,
    trained: Collection[int],
) -> list[tuple[Any, int]]:
    """Tell every model who owns its variables, and replicas who updates those that the step has gradients of.

    This rank's get their initial values now.

    Returns:
        The variables of which that was decided now, each with the stage that stores it.
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
    placed = [pair for store, owned in to_place for pair in store.to_settle(owned, chunks)]
    known = [(v, state.owner) for store, _ in to_place for v in store if (state := store.state(v)) is not None]
    handles = {id(lowered.variables[index].handle) for index in trained}
    sharded_slots.share(v for v, owner in [*known, *placed] if owner == stage and id(v.handle) in handles)
    restored = pending_restore.values_for(placed)
    for store, by_position in to_place:
        store.settle(by_position, stage, seed, restored, chunks)
    pending_restore.take_what_exists()
    return placed
