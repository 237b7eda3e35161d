"""What smp_tf knows about a variable of a distributed model: who stores it, and its initial value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from smp_tf import tf_internals
from smp_tf.partition.layout import Layout
from smp_tf.variables import precedence


@dataclasses.dataclass
class Stored:
    """What is known of a variable's storage. All models that use the variable share it.

    Args:
        layout: where its value, gradient and slots are, the same on all ranks; of no stage before the plan.
        chunks: the stage of every chunk, in the plan that has decided this.
        number: number of the variable among those of all models, in the order in which steps gave them to stages. It is
            the same on all ranks.
        is_kept: whether no step has used the variable so far. Its owner only keeps it, until a step that uses it
            decides who stores it.
        is_early: whether it was placed before any step, since its value was asked for. It is kept there, too, but no
            plan follows that.
        has_value: whether this rank has memory with a value of it. Before the plan that is so where the variable was
            built with its value, and after it where the layout says that it is here.
        block: a variable with this replica's rows, once they were updated. It counts as this variable.
    """

    layout: Layout = dataclasses.field(default_factory=Layout)
    chunks: tuple[int, ...] | None = None
    number: int | None = None
    is_kept: bool = False
    is_early: bool = False
    has_value: bool = False
    block: tf.Variable | None = None

    def put(self, layout: Layout) -> None:
        """Notes where the variable is from now on.

        Args:
            layout: where its value, gradient and slots are.
        """
        if layout.slots != self.layout.slots:
            # It is of other rows than now.
            self.block = None
        self.layout = layout


@dataclasses.dataclass
class VariableState:
    """What smp_tf knows about one variable of a distributed model.

    Args:
        name: unique name within the model, such as "net/dense/kernel".
        initial_value: returns the initial value; None for a variable that was built with its value.
        op_seeds: the seeds that TensorFlow's random ops in the initial value have drawn, in the order of the ops.
        position: how many variables of the model were created before it.
        storage: who stores it. All models that use the variable share it.
    """

    name: str
    initial_value: Callable[[], tf.Tensor] | None
    op_seeds: tuple[tf_internals.OpSeeds, ...]
    position: int
    storage: Stored = dataclasses.field(default_factory=Stored)

    @property
    def owner(self) -> int | None:
        """Returns the stage that stores the variable; None before the plan."""
        return self.storage.layout.stage

    @property
    def chunk(self) -> int | None:
        """Returns the chunk that it belongs to; None before the plan."""
        return self.storage.layout.chunk

    @property
    def is_decided(self) -> bool:
        """Returns whether a step that uses the variable has decided who stores it."""
        return self.owner is not None and not self.storage.is_kept

    @property
    def has_value(self) -> bool:
        """Whether this rank has memory with a value of it."""
        return self.storage.has_value

    @property
    def is_elsewhere(self) -> bool:
        """Whether the plan has given the variable to other ranks, and this one has freed it."""
        return self.owner is not None and not self.has_value


def set_initial_value(variable: Any, value: Callable[[], Any]) -> bool:
    """Replaces the initial value of a variable, if it is not decided yet who stores it.

    Args:
        variable: any variable.
        value: returns the value. It is called on the rank that will store it.

    Returns:
        Whether it was replaced. If not, the variable has a value, and must be assigned to.
    """
    state = getattr(variable, "smp_state", None)
    if state is None or state.has_value or state.owner is not None:
        return False
    state.initial_value, state.op_seeds = value, ()
    precedence.note(variable)
    return True
