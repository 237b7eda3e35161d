"""Who has what of a variable, as literal layouts on small meshes say it."""

from __future__ import annotations

import doctest
import json
from typing import Any

import pytest

from smp_tf.partition import layout as layouts
from smp_tf.partition.errors import PlacementError
from smp_tf.partition.layout import Layout
from smp_tf.partition.mesh import Mesh
from smp_tf.partition.spread import (
    EVERYWHERE,
    Partial,
    SplitOver,
    Whole,
    is_first_at,
    spread_from_json,
    spread_to_json,
)

TWO_BY_TWO = Mesh(4, 2)
#: World ranks are, by replica, stage and shard: (0, 0, 0), (0, 0, 1), (0, 1, 0), ...
WITH_SHARDS = Mesh(8, 2, shards=2)

PLAIN = Layout(1, 3)
OF_ONE = Layout(1, 3, gradient=Whole("D", 1, 2), slots=Whole("D", 1, 2))
OF_ROWS = Layout(1, 3, slots=SplitOver("D", 0, (0, 49, 100), keeper=1))
OF_COLUMNS = Layout(0, 0, SplitOver("T", 1, (0, 3, 8)), SplitOver("T", 1, (0, 3, 8)), SplitOver("T", 1, (0, 3, 8)))
OF_SUMMANDS = Layout(0, 0, gradient=Partial("D"))


def ranks(mesh: Mesh, question: Any) -> list[int]:
    """The world ranks of which something is so."""
    return [rank for rank in range(mesh.world_size) if question(mesh.coordinates(rank))]


def test_examples() -> None:
    assert doctest.testmod(layouts) == (0, 5)


@pytest.mark.parametrize(
    ("layout", "mesh", "here", "updated", "updated_whole", "receives", "writes_value", "writes_slots"),
    [
        (PLAIN, TWO_BY_TWO, [1, 3], [1, 3], [1, 3], [1, 3], [1], [1]),
        (OF_ONE, TWO_BY_TWO, [1, 3], [3], [3], [3], [1], [3]),
        (OF_ROWS, TWO_BY_TWO, [1, 3], [1, 3], [3], [1, 3], [1], [1, 3]),
        (OF_SUMMANDS, TWO_BY_TWO, [0, 2], [0, 2], [0, 2], [0, 2], [0], [0]),
        # Where T is 2 both shards of a stage have what is whole, and the first of them writes it.
        (PLAIN, WITH_SHARDS, [2, 3, 6, 7], [2, 3, 6, 7], [2, 3, 6, 7], [2, 3, 6, 7], [2], [2]),
        (OF_ONE, WITH_SHARDS, [2, 3, 6, 7], [6, 7], [6, 7], [6, 7], [2], [6]),
        (OF_ROWS, WITH_SHARDS, [2, 3, 6, 7], [2, 3, 6, 7], [6, 7], [2, 3, 6, 7], [2], [2, 6]),
        (OF_COLUMNS, WITH_SHARDS, [0, 1, 4, 5], [0, 1, 4, 5], [0, 4], [0, 1, 4, 5], [0, 1], [0, 1]),
    ],
)
def test_who_has_updates_receives_and_writes(
    layout: Layout,
    mesh: Mesh,
    here: list[int],
    updated: list[int],
    updated_whole: list[int],
    receives: list[int],
    writes_value: list[int],
    writes_slots: list[int],
) -> None:
    assert ranks(mesh, layout.is_here) == here
    whole = layout.slots_of(by_rows=False)
    assert ranks(mesh, lambda place: layout.is_updated_at(layout.slots_of(by_rows=True), place)) == updated
    assert ranks(mesh, lambda place: layout.is_updated_at(whole, place)) == updated_whole
    assert ranks(mesh, layout.receives_gradient) == receives
    assert ranks(mesh, lambda place: layout.is_first_at(layout.value, place)) == writes_value
    assert ranks(mesh, lambda place: layout.is_first_at(layout.slots, place)) == writes_slots


def test_what_no_stage_stores_is_on_all_ranks() -> None:
    nowhere = Layout()
    assert ranks(TWO_BY_TWO, nowhere.is_here) == ranks(TWO_BY_TWO, nowhere.receives_gradient) == [0, 1, 2, 3]
    assert ranks(TWO_BY_TWO, lambda place: nowhere.is_updated_at(nowhere.slots, place)) == [0, 1, 2, 3]
    # The first rank of all writes it.
    assert ranks(TWO_BY_TWO, lambda place: nowhere.is_first_at(nowhere.value, place)) == [0]


def test_which_rows() -> None:
    at_0, at_1 = {"P": 0, "D": 0, "T": 1}, {"P": 0, "D": 1, "T": 0}
    rows = SplitOver("D", 0, (0, 49, 100))
    assert (rows.rows_at(at_0), rows.rows_at(at_1), rows.only, rows.undivided()) == (
        (0, 49),
        (49, 100),
        None,
        Whole("D", 0, 2),
    )
    assert not SplitOver("D", 0, (0, 0, 5)).is_at(at_0)
    assert (EVERYWHERE.rows_at(at_0), EVERYWHERE.only, Whole("D", 1, 2).only) == (None, None, 1)


TEXTS = {
    "stage 1, chunk 3: value whole; gradient whole; slots whole": PLAIN,
    "stage 1, chunk 3: value whole; gradient whole on D 1 of 2; slots whole on D 1 of 2": OF_ONE,
    "stage 1, chunk 3: value whole; gradient whole; slots split over D along dimension 0 at 0, 49, 100, undivided on "
    "1": OF_ROWS,
    "stage 0, chunk 0: value whole; gradient partial sum over D; slots whole": OF_SUMMANDS,
    "no stage: value whole; gradient whole; slots whole": Layout(),
}


@pytest.mark.parametrize("text", TEXTS)
def test_text(text: str) -> None:
    assert str(TEXTS[text]) == text


@pytest.mark.parametrize("layout", [*TEXTS.values(), OF_COLUMNS])
def test_json_gives_the_same_spreads_back(layout: Layout) -> None:
    for spread in (layout.value, layout.gradient, layout.slots):
        assert spread_from_json(json.loads(json.dumps(spread_to_json(spread))), "slots") == spread


WHOLE = {"kind": "whole", "axis": "", "at": 0, "of": 1}
ROWS = {"kind": "split", "axis": "D", "dimension": 0, "borders": [0, 49, 100], "keeper": 1}


@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        (OF_ROWS, {"stage": 1, "chunk": 3, "value": WHOLE, "gradient": WHOLE, "slots": ROWS}),
        (Layout(), {"stage": None, "chunk": None, "value": WHOLE, "gradient": WHOLE, "slots": WHOLE}),
    ],
)
def test_json_is_told_by_kind_and_name(layout: Layout, fields: dict[str, Any]) -> None:
    assert layout.to_json() == fields


def test_layouts_are_values() -> None:
    assert {OF_ONE, Layout(1, 3, EVERYWHERE, Whole("D", 1, 2), Whole("D", 1, 2))} == {OF_ONE}
    with pytest.raises(AttributeError):
        OF_ONE.stage = 0  # type: ignore[misc]


def changed(**changes: Any) -> Any:
    return spread_from_json({**ROWS, **changes}, "slots")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Whole("P", 0, 2), "differ along D and T. Received: the axis 'P'"),
        (lambda: Whole("D", 2, 2), "Received: place 2 of 2 on D"),
        (lambda: Whole("", 0, 2), "Received: place 0 of 2 on no axis"),
        (lambda: SplitOver("D", 0, (0, 5, 3)), r"none is before the one before it. Received: \[0, 5, 3\]"),
        (lambda: SplitOver("D", 0, (1, 3)), r"Borders begin with 0, .* Received: \[1, 3\]"),
        (lambda: SplitOver("D", 0, (0, 3), keeper=1), "one of the 1 places. Received: 1"),
        (lambda: Partial("D", "mean"), "by 'sum' or 'max'. Received: 'mean'"),
        (
            lambda: is_first_at(Partial("D"), {"P": 0, "D": 0, "T": 0}),
            "no value until it is reduced. Received: partial",
        ),
        (lambda: spread_from_json(None, "slots"), "kind among whole, split, partial"),
        (lambda: spread_from_json([], "slots"), "kind among whole, split, partial"),
        (lambda: changed(kind="cut"), "kind among whole, split, partial"),
        (lambda: changed(more=1), "The slots of a layout has the fields kind, axis, dimension"),
        (lambda: changed(axis=1), "The axis of a layout's slots is a text. Received: 1"),
        (lambda: changed(borders=[0, 1.5]), r"The borders of a layout's slots .* \[0, 1.5\]"),
        (lambda: changed(keeper=True), "The slots of a layout must be whole numbers"),
    ],
)
def test_what_is_no_layout_is_told_in_words(make: Any, words: str) -> None:
    with pytest.raises(PlacementError, match=words):
        make()
