"""Where a variable of a model is from now on: what a step decides of it, the same on all ranks.

nobody stores it yet       before: no stage     layout: stage 1     it begins with its initial value there
stage 1 has only kept it   before: stage 1      layout: stage 0     its value and its slots move

A variable whose value is asked for before any step is kept early, in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smp_tf.partition.layout import Layout


@dataclass(frozen=True, eq=False)
class Decision:
    """Where a variable's value, gradient and slots are from now on.

    Args:
        variable: of a distributed model.
        layout: where they are from now on.
        before: where they were: on no stage where nobody has stored the variable so far.
        is_used: whether the step uses the variable. Else a stage only keeps it, until a step that uses it decides.
        is_early: whether this is decided before any step, since the value was asked for.
    """

    variable: Any
    layout: Layout
    before: Layout
    is_used: bool = True
    is_early: bool = False

    @property
    def is_first(self) -> bool:
        """Whether nobody has stored the variable so far."""
        return self.before.stage is None

    @property
    def moves(self) -> bool:
        """Whether a stage has stored the variable so far, and another one does from now on."""
        return self.before.stage not in (None, self.layout.stage)
