"""Where a variable's value, gradient and slots are on the mesh: one frozen value, the same on all ranks of its stage.

    Layout(stage=1, chunk=1, gradient=Whole("D", 0, 2), slots=Whole("D", 0, 2))

                stage 0      stage 1
    replica 0   -            value, gradient, slots     it updates the weight, and writes all three
    replica 1   -            value                      it takes the new value

Each of the three has a spread over the ranks of the stage. It is whole on all of them, or on one place of an axis. It
is split along a dimension. Or it is partial: the ranks hold summands. The layout answers who has it, which rows, who
writes it into a checkpoint, who updates it and who receives its gradient, given a rank's coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smp_tf.partition.spread import EVERYWHERE, Place, Spread, is_first_at, spread_to_json


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the value, the gradient and the slots of a variable are.

    Args:
        stage: the stage that stores it; None before it is decided, and for a variable that all ranks have.
        chunk: the chunk of the plan that it belongs to; None where it has none.
        value: how the value lies over the ranks of the stage.
        gradient: how the average of its gradient lies over the ranks of the stage, as steps give it.
        slots: how an optimizer's slots for it lie over the ranks of the stage. They say who updates it.

    Example:
        >>> from smp_tf.partition.spread import SplitOver
        >>> layout = Layout(1, 1, slots=SplitOver("D", 0, (0, 49, 100), keeper=1))
        >>> print(layout.slots)
        split over D along dimension 0 at 0, 49, 100, undivided on 1
        >>> place = {"P": 1, "D": 1, "T": 0}
        >>> layout.slots.rows_at(place), layout.is_first_at(layout.slots, place)
        ((49, 100), True)
    """

    stage: int | None = None
    chunk: int | None = None
    value: Spread = EVERYWHERE
    gradient: Spread = EVERYWHERE
    slots: Spread = EVERYWHERE

    def is_here(self, place: Place) -> bool:
        """Returns whether a rank stores the variable, or some of it.

        Args:
            place: coordinates of the rank.
        """
        return self.stage in (None, place["P"]) and self.value.is_at(place)

    @property
    def has_whole_value(self) -> bool:
        """Whether every rank of the stage has all of the value; otherwise it is brought together for each use."""
        return self.value == EVERYWHERE

    def slots_of(self, *, by_rows: bool) -> Spread:
        """Returns how the slots of an optimizer lie.

        Args:
            by_rows: whether the optimizer updates rows of the variable by themselves.
        """
        return self.slots if by_rows else self.slots.undivided()

    def is_updated_at(self, slots: Spread, place: Place) -> bool:
        """Returns whether a rank updates the variable, or some of it: it has slots of what it updates.

        Args:
            slots: how an optimizer's slots lie, as `slots_of` says.
            place: of the rank.
        """
        return self.is_here(place) and slots.is_at(place)

    def receives_gradient(self, place: Place) -> bool:
        """Returns whether a rank receives the average of the gradient, or some of it.

        Args:
            place: coordinates of the rank.
        """
        return self.is_here(place) and self.gradient.is_at(place)

    def is_first_at(self, spread: Spread, place: Place) -> bool:
        """Returns whether a rank is the first of those that have the same part of something.

        It writes the part into a checkpoint, and counts it in a norm of all parts. Of what no stage owns that is a rank
        of stage 0.

        Args:
            spread: spread of that: `value`, or what `slots_of` gives.
            place: coordinates of the rank.
        """
        return place["P"] == (self.stage or 0) and is_first_at(spread, place)

    def to_json(self) -> dict[str, Any]:
        """Returns the layout as JSON values."""
        spreads = {name: getattr(self, name) for name in ("value", "gradient", "slots")}
        return {
            "stage": self.stage,
            "chunk": self.chunk,
            **{name: spread_to_json(spread) for name, spread in spreads.items()},
        }

    def __str__(self) -> str:
        where = "no stage" if self.stage is None else f"stage {self.stage}, chunk {self.chunk}"
        return f"{where}: value {self.value}; gradient {self.gradient}; slots {self.slots}"


#: Of what no stage owns, and of what is not decided yet.
NO_STAGE = Layout()
