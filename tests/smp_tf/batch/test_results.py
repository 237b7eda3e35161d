"""What a step returns is made anew for every batch, in the structure that the step function returned."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import tensorflow as tf

from smp_tf.batch.results import ResultStructure, pack
from smp_tf.partition.trace.lower import OutputSlot

A, B = OutputSlot((0,)), OutputSlot((1, 2))

Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass(frozen=True)
class Record:
    """A class of the script's own."""

    value: Any
    rest: Any = None


class ReadOnly(Mapping[str, Any]):
    """A mapping that cannot be changed."""

    def __init__(self, items: Any) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def test_slots_are_in_the_order_of_the_places() -> None:
    structure = ResultStructure({"b": [B, "text"], "a": (A, None)})
    assert structure.slots == [B, A]
    assert structure.filled(["x", "y"]) == {"b": ["x", "text"], "a": ("y", None)}


@pytest.mark.parametrize(
    "kind",
    [
        lambda item: item,
        lambda item: [item],
        lambda item: (1, item),
        lambda item: Pair(item, 2),
        lambda item: OrderedDict(z=item, a=3),
        lambda item: defaultdict(list, {"x": item}),
        lambda item: Record(Record([item])),
    ],
    ids=["alone", "list", "tuple", "named tuple", "ordered", "default", "records"],
)
def test_every_kind_of_structure_comes_back(kind: Any) -> None:
    traced = tf.nest.map_structure(lambda item: A if item == "tensor" else item, pack(kind("tensor"), "train"))
    found = ResultStructure(traced).filled(["x"])
    assert found == kind("x")
    assert type(found) is type(kind("x"))


def test_a_mapping_that_cannot_be_changed_comes_back() -> None:
    found = ResultStructure(ReadOnly({"x": A, "y": 3})).filled([7])
    assert type(found) is ReadOnly
    assert dict(found) == {"x": 7, "y": 3}


def test_what_a_script_changes_in_one_result_is_not_in_the_next() -> None:
    structure = ResultStructure({"loss": A, "names": ["a"]})
    structure.filled([1])["names"].append("b")
    assert structure.filled([2]) == {"loss": 2, "names": ["a"]}
