"""Says whether replicas share slots, and which layouts of variables are in force in this job, equal on all ranks.

A variable keeps the layout that was decided for it, even after `smp.shutdown`, since optimizers have slots by it. A job
that shares no slots, or shares them among another number of replicas, uses the same layout with all slots everywhere.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from smp_tf.job import runtime
from smp_tf.keras import optimizer_reports, optimizer_trials
from smp_tf.partition.layout import Layout
from smp_tf.partition.spread import EVERYWHERE, Partial, Place, Spread
from smp_tf.replicas import unaveraged
from smp_tf.variables.store import store_of, whole_of


def are_shared() -> bool:
    """Returns whether the replicas share the optimizer's slots."""
    running = runtime.current_or_none()
    return running is not None and running.config.shard_optimizer_state and running.topology.replicas > 1


def are_received_apart() -> bool:
    """Returns whether replicas receive the averages of different gradients, each those of weights that it updates."""
    # On the host they are summed in equal parts, and shares are not equal parts.
    return are_shared() and not runtime.current().config.gradient_offload


def count() -> int:
    """Returns the number of replicas that share slots; 1 where all keep them."""
    return runtime.current().topology.replicas if are_shared() else 1


def here() -> Place:
    """Returns the coordinates of this rank; those of the first rank where there is no job."""
    running = runtime.current_or_none()
    return {"P": 0, "D": 0, "T": 0} if running is None else running.topology.place


def layout_of(variable: Any) -> Layout:
    """Returns where the value, the gradient and the slots of a variable are in the running job.

    Args:
        variable: any variable. One of the script's own is on all ranks.
    """
    store = store_of(variable)
    state = store.state(variable) if store is not None else None
    layout = Layout() if state is None else state.storage.layout
    if unaveraged.are_left():
        # The optimizer averages gradients, or what it computes from them.
        return dataclasses.replace(layout, gradient=Partial("D"), slots=EVERYWHERE)
    if layout.slots == EVERYWHERE:
        return layout
    if not are_shared() or layout.slots.places != count():
        return dataclasses.replace(layout, gradient=EVERYWHERE, slots=EVERYWHERE)
    return layout if are_received_apart() else dataclasses.replace(layout, gradient=EVERYWHERE)


def slots_of(variable: Any, optimizer: Any) -> Spread:
    """Returns how the slots that an optimizer has of a variable lie over the ranks of its stage.

    Args:
        variable: any variable.
        optimizer: an optimizer of Keras; None where it is unknown. Then slots that depend on it are taken to be
            everywhere.
    """
    layout = layout_of(variable)
    if layout.slots.undivided() == layout.slots:
        return layout.slots
    if optimizer is None:
        return EVERYWHERE
    return layout.slots_of(by_rows=_updates_rows(optimizer, variable))


def _updates_rows(optimizer: Any, variable: Any) -> bool:
    """Returns whether an optimizer updates rows of a variable that may be cut: it can, and has no whole slots."""
    if not optimizer_trials.updates_rows(optimizer):
        return False
    return not optimizer_reports.has_whole_slots(optimizer, whole_of(variable))
