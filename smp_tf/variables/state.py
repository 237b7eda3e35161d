"""What smp_tf knows about a variable of a distributed model: who stores it, and what it begins with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from smp_tf import tf_internals
from smp_tf.variables import precedence


@dataclasses.dataclass
class Placement:
    """Who stores a variable: one and the same for all models that use it.

    Args:
        owner: its stage; None before the plan.
        chunk: the chunk of that stage that it belongs to.
        chunks: the stage of every chunk, in the plan that has decided this.
        place: its number among all variables of models, in the order in which steps have given them to stages: the same
            on all ranks.
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
    place: int | None = None
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
    precedence.note(variable)
    return True
