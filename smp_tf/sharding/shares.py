"""Shares a stage's optimizer slots among replicas. Each updates its weights, and the others take the new values.

    stage's weights    replica 0                                    replica 1
    kernel             average ─ slots, update ── new value ──────▶ takes it
    bias               takes it ◀─────────────── new value ──────── average ─ slots, update
    embedding          average ─ slots, update ── its rows ───────▶ takes them
                       takes them ◀───────────── its rows ───────── average ─ slots, update

Shares have equal bytes (`partition/place/slot_shares.py`). They hold whole weights, and rows of those that would make
shares unequal. Only the replica that updates a weight receives the average of its gradient
(`replicas/reduce_scatter.py`). On the others the gradient is None, like that of another stage's weight. For a weight
that is cut, each replica receives the average for its rows where the step itself applies it, as in `fit`. Where a
script applies it, the average goes to all, since a script may look at gradients, and a list of gradients cannot say
that one of them is of some rows. An optimizer is given the weights of this rank's share (`optimizer/patch.py`), or
blocks with their rows (`row_blocks.py`), and makes slots for no others. An optimizer that cannot update rows by
themselves updates the whole weight, on one replica. What it has written is then gathered (`gather.py`).

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC20, sections 5.1
and 5.2 (slots are shared, and averages of gradients; sums over microbatches are not).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from smp_tf.announce import announce
from smp_tf.errors import StepError
from smp_tf.job import runtime
from smp_tf.job_state import JobState
from smp_tf.keras import adapter, optimizer_reports, optimizer_trials
from smp_tf.partition.layout import Layout
from smp_tf.partition.place.shared_layouts import with_shared_slots
from smp_tf.partition.place.slot_shares import Sized
from smp_tf.partition.spread import EVERYWHERE, SplitOver
from smp_tf.sharding import layouts
from smp_tf.variables import store

#: The number of replicas that share each optimizer's slots, noted when they were first built.
_shares_of: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class _State:
    """What is counted while variables are shared out."""

    def __init__(self) -> None:
        #: For each stage, the bytes whose slots each replica was given so far. They are counted, since the time at
        #: which Python ends models is not fixed.
        self.loads: dict[int | None, list[float]] = {}


_state = JobState(_State)


def shares_of(optimizer: Any) -> int:
    """Returns the number of replicas that share an optimizer's slots. It is as when this was first asked."""
    return _shares_of.setdefault(optimizer, layouts.count())


def share(placed: Iterable[tuple[Any, Layout]]) -> dict[int, Layout]:
    """Decides which replica keeps the slots of variables that a step has gradients of, for each stage by itself.

    What was decided for the same number of replicas stays, even after `smp.shutdown`, since optimizers have slots by
    it.

    Args:
        placed: variables of models with their layouts, those of all stages, the same in the same order on all ranks.

    Returns:
        The layouts that are decided now, by `id` of the variable's handle.
    """
    if not layouts.are_shared():
        return {}
    replicas = layouts.count()
    # Several models may use one. A variable of unknown shape has no size by which to share it out, so all replicas
    # update it.
    known = {id(v.handle): (v, layout) for v, layout in placed if v.shape.is_fully_defined()}
    todo = {key: (v, layout) for key, (v, layout) in known.items() if layout.slots.places != replicas}
    weights = [(sized(v), layout) for v, layout in todo.values()]
    return dict(zip(todo, with_shared_slots(weights, replicas, _state().loads), strict=True))


def sized(variable: Any) -> Sized:
    """Returns what a variable counts when slots are shared out, and whether it may be cut.

    Args:
        variable: a variable of known shape.
    """
    # A constraint may depend on columns, as that of a norm does.
    may_be_cut = variable.shape.rank and variable.constraint is None
    return Sized(store.nbytes_of(variable), variable.shape[0] if may_be_cut else 1)


def require_rows_as_before(optimizer: Any, updated: Iterable[Any]) -> None:
    """Says which variables that are too large for a share have whole slots in an optimizer.

    Args:
        optimizer: of Keras.
        updated: variables. This rank stores some of them.

    Raises:
        StepError: the optimizer looks at whole variables now, and has made slots of rows.
    """
    # Variables that stand for rows come from an apply that has looked at the whole ones.
    whole = (variable for variable in updated if store.whole_of(variable) is variable)
    may_be_cut = [v for v in whole if isinstance(layouts.layout_of(v).slots, SplitOver)]
    if not may_be_cut:
        return
    inner, names = adapter.slots().innermost(optimizer), ", ".join(variable.name for variable in may_be_cut)
    name = type(inner).__name__
    if not optimizer_trials.updates_rows(inner):
        why = f"{name} updates weights as a whole, not rows by themselves"
    elif getattr(inner, "clipnorm", None):
        raise StepError(
            f"clipnorm of this {name} was set after its first use. With shard_optimizer_state each replica updates "
            f"rows of {names}, and the norm is that of the whole. Give clipnorm to the optimizer when it is made, or "
            f"global_clipnorm."
        )
    elif any(optimizer_reports.has_whole_slots(inner, variable) for variable in may_be_cut):
        why = f"{name} has made slots of whole weights before it was known that replicas share them"
    else:
        return
    announce(
        f"{why}: with shard_optimizer_state one replica keeps all slots of {names}, and more than its share.",
        runtime.current().topology.replica,
    )


def of_shares() -> set[int]:
    """Returns the slots that no other replica of this rank's stage has, by `id` of their handles."""
    if not layouts.are_shared():
        return set()
    known = ((variable, layouts.layout_of(variable)) for variable in store.of_models())
    place = layouts.here()
    shared = [variable for variable, layout in known if layout.is_here(place) and layout.slots != EVERYWHERE]
    return {
        id(slot.handle)
        for optimizer in optimizer_reports.in_use()
        for _, _, slot in adapter.slots().slots(optimizer, shared)
    }
