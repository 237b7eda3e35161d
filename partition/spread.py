"""How a variable's value, gradient or slots lie over the ranks of its stage.

Whole()                          all ranks have all of it
Whole("D", 1, 2)                 replica 1 of 2 has all of it
SplitOver("D", 0, (0, 49, 100))  replica 0 has rows 0 to 48, replica 1 those from 49
Partial("D")                     each replica has a summand
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from smp_tf.partition.errors import PlacementError

#: A rank's coordinates by axis, as `Mesh.coordinates` gives them.
Place = Mapping[str, int]

#: Along these axes the ranks of one stage differ.
_OF_STAGE = ("D", "T")


def _require_axis(spread: Any, optional: bool = False) -> None:
    if spread.axis not in _OF_STAGE and not (optional and not spread.axis):
        raise PlacementError(f"The ranks of a stage differ along D and T. Received: the axis {spread.axis!r}")


def _require_borders(borders: Sequence[int]) -> None:
    if len(borders) < 2 or borders[0] != 0 or any(first > last for first, last in itertools.pairwise(borders)):
        raise PlacementError(f"Borders begin with 0, and none is before the one before it. Received: {list(borders)}")


class Spread(Protocol):
    """How a variable's value, gradient or slots lie over the ranks of its stage."""

    kind: ClassVar[str]

    @property
    def axis(self) -> str:
        """Returns the axis along which ranks have different parts; "" where there is none."""

    @property
    def places(self) -> int:
        """Returns the extent of the axis; 1 where there is none."""

    @property
    def only(self) -> int | None:
        """Returns the one place on the axis that has all of it; None where several places have it, or parts of it."""

    def is_at(self, place: Place) -> bool:
        """Returns whether the rank at a place of the stage has some of it."""

    def rows_at(self, place: Place) -> tuple[int, int] | None:
        """Returns the part that a rank has of the split dimension, as start and stop; None where nothing is split."""

    def undivided(self) -> Spread:
        """Returns the spread for those who need it whole, such as an optimizer that uses the norm of a weight."""


@dataclass(frozen=True, slots=True)
class Whole:
    """Every rank of the stage has all of it, or those at one place of an axis do.

    Args:
        axis: the axis along which one place has it; "" where all ranks have it.
        at: the place that has it.
        of: the extent of the axis.
    """

    kind: ClassVar[str] = "whole"
    axis: str = ""
    at: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        _require_axis(self, optional=True)
        if not 0 <= self.at < self.of or (not self.axis and self.of != 1):
            raise PlacementError(
                f"What is whole on one place is on one of the places of an axis. Received: place {self.at} of "
                f"{self.of} on {self.axis or 'no axis'}."
            )

    @property
    def places(self) -> int:
        """Returns the extent of the axis."""
        return self.of

    @property
    def only(self) -> int | None:
        """Returns the one place that has it; None where all have it."""
        return self.at if self.axis else None

    def is_at(self, place: Place) -> bool:
        """Returns whether all ranks have it, or this place."""
        return not self.axis or place[self.axis] == self.at

    def rows_at(self, place: Place) -> tuple[int, int] | None:
        """Returns None: nothing is split."""
        return None

    def undivided(self) -> Whole:
        """Returns itself."""
        return self

    def __str__(self) -> str:
        return f"whole on {self.axis} {self.at} of {self.of}" if self.axis else "whole"


@dataclass(frozen=True, slots=True)
class SplitOver:
    """Split along a dimension: place p of an axis has the part from borders[p] to borders[p + 1].

    Args:
        axis: an axis of the mesh.
        dimension: a dimension of the variable.
        borders: where the parts begin and end. The first is 0, the last the extent of the dimension. Parts may be
            empty.
        keeper: the place that has all of it for those who need it whole.
    """

    kind: ClassVar[str] = "split"
    axis: str
    dimension: int
    borders: tuple[int, ...]
    keeper: int = 0

    def __post_init__(self) -> None:
        _require_axis(self)
        _require_borders(self.borders)
        if not 0 <= self.keeper < self.places:
            raise PlacementError(
                f"The keeper of what is split is one of the {self.places} places. Received: {self.keeper}"
            )

    @property
    def places(self) -> int:
        """Returns the number of parts."""
        return len(self.borders) - 1

    @property
    def only(self) -> int | None:
        """Returns None: places have parts."""
        return None

    def is_at(self, place: Place) -> bool:
        """Returns whether the part at a place is not empty."""
        start, stop = self.rows_at(place)
        return start < stop

    def rows_at(self, place: Place) -> tuple[int, int]:
        """Returns the first and the last border of the part at a place."""
        return self.borders[place[self.axis]], self.borders[place[self.axis] + 1]

    def undivided(self) -> Whole:
        """Returns that it is whole at its keeper."""
        return Whole(self.axis, self.keeper, self.places)

    def __str__(self) -> str:
        borders = ", ".join(map(str, self.borders))
        return f"split over {self.axis} along dimension {self.dimension} at {borders}, undivided on {self.keeper}"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every place of an axis has a summand, or one of the values to take the largest of.

    Args:
        axis: an axis of the mesh.
        reduction: how the places' values are reduced, "sum" or "max".
    """

    kind: ClassVar[str] = "partial"
    axis: str
    reduction: str = "sum"

    def __post_init__(self) -> None:
        _require_axis(self)
        if self.reduction not in ("sum", "max"):
            raise PlacementError(f"What is partial is reduced by 'sum' or 'max'. Received: {self.reduction!r}")

    @property
    def places(self) -> int:
        """Returns 1: all places have as much."""
        return 1

    @property
    def only(self) -> int | None:
        """Returns None: all places have a summand."""
        return None

    def is_at(self, place: Place) -> bool:
        """Returns true: every place has a summand."""
        return True

    def rows_at(self, place: Place) -> tuple[int, int] | None:
        """Returns None: nothing is split."""
        return None

    def undivided(self) -> Partial:
        """Returns itself."""
        return self

    def __str__(self) -> str:
        return f"partial {self.reduction} over {self.axis}"


#: All ranks of the stage have all of it.
EVERYWHERE = Whole()

_KINDS: dict[str, Any] = {spread.kind: spread for spread in (Whole, SplitOver, Partial)}


def is_first_at(spread: Spread, place: Place) -> bool:
    """Returns whether the rank at a place is the first of those that have the same part.

    The first one writes the part into a checkpoint, and counts it in a norm of all parts.

    Args:
        spread: how the whole lies over the ranks.
        place: coordinates of a rank of the stage.

    Raises:
        PlacementError: the spread is partial. What a rank has is no part of a value before it is reduced.
    """
    if isinstance(spread, Partial):
        raise PlacementError(f"What is partial is no value until it is reduced. Received: {spread}")
    return spread.is_at(place) and all(place[axis] == 0 for axis in _OF_STAGE if axis != spread.axis)


def spread_to_json(spread: Spread) -> dict[str, Any]:
    """Returns a spread as JSON values.

    Args:
        spread: a spread of any kind.
    """
    found = {field.name: getattr(spread, field.name) for field in dataclasses.fields(_KINDS[spread.kind])}
    return {
        "kind": spread.kind,
        **{name: list(value) if isinstance(value, tuple) else value for name, value in found.items()},
    }


def spread_from_json(fields: Any, name: str) -> Spread:
    """Returns the spread that `spread_to_json` has written.

    Args:
        fields: JSON values.
        name: what of a layout has this spread, for messages.

    Raises:
        PlacementError: the fields are no spread.
    """
    said = fields.get("kind") if isinstance(fields, dict) else None
    kind = _KINDS.get(said) if isinstance(said, str) else None
    if kind is None:
        raise PlacementError(f"The {name} of a layout is of a kind among {', '.join(_KINDS)}. Received: {fields!r}")
    wanted = dataclasses.fields(kind)
    _require_fields(f"The {name} of a layout", fields, ["kind", *(field.name for field in wanted)])
    given = {field.name: fields[field.name] for field in wanted}
    texts = {"axis", "reduction"} & given.keys()
    for text in texts:
        if not isinstance(given[text], str):
            raise PlacementError(f"The {text} of a layout's {name} is a text. Received: {given[text]!r}")
    if "borders" in given:
        _require_numbers(f"The borders of a layout's {name}", given["borders"])
        given["borders"] = tuple(given["borders"])
    _require_numbers(f"The {name} of a layout", [v for key, v in given.items() if key not in {"borders", *texts}])
    spread: Spread = kind(**given)
    return spread


def _require_fields(what: str, fields: Any, names: Sequence[str]) -> None:
    """Raises an error unless a JSON value is an object with these fields.

    Args:
        what: what the value is, for messages.
        fields: the JSON value.
        names: names of the fields.

    Raises:
        PlacementError: the value is something else.
    """
    if not isinstance(fields, dict) or set(fields) != set(names):
        raise PlacementError(f"{what} has the fields {', '.join(names)}. Received: {fields!r}")


def _require_numbers(what: str, values: Any) -> None:
    """Raises an error unless a JSON value is a list of whole numbers.

    Args:
        what: what the value is, for messages.
        values: the JSON value.

    Raises:
        PlacementError: the value is something else.
    """
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise PlacementError(f"{what} must be whole numbers. Received: {values!r}")
