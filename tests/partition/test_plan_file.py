"""The file of plans: its text, what is refused of it, and which plan a step finds in it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from smp_tf.partition.errors import PlacementError
from smp_tf.partition.op_graph import OpGraph
from smp_tf.partition.plan import Plan, SharedVariable
from smp_tf.partition.plan_file import PlanFile, Planned, StoredPlan, to_store
from smp_tf.partition.units import build_units
from smp_tf.planning import PlacementRequest, units_of
from smp_tf.proposal import propose

from .op_graph_builder import chain_of_dense

TWO = PlacementRequest(stages=2, microbatches=2, schedule="simple", objective="memory", slots=0.0)

SHARES = (0.25, 0.75)
TEXT = """{
 "version": 4,
 "partitions": 2,
 "plans": [
  {
   "step": "train",
   "fingerprint": "f",
   "microbatches": 2,
   "pipeline": "simple",
   "optimize": "memory",
   "recompute": false,
   "placement": [
    0,
    1
   ],
   "units": {
    "net/dense_0": 0,
    "net/dense_1": 1
   },
   "shared": {},
   "planned": {
    "first": [
     "net/dense_0",
     "net/dense_1"
    ],
    "shared": {}
   },
   "variables": {
    "net/dense_0/kernel": "float32[8,8]",
    "net/dense_1/kernel": "float32[8,8]"
   },
   "forecast": [
    {
     "parameters": 64,
     "bytes": 768,
     "time_share": 0.25
    },
    {
     "parameters": 64,
     "bytes": 1024,
     "time_share": 0.75
    }
   ]
  }
 ]
}
"""


def stored(layers: int = 2, step: str = "train", **changes: Any) -> StoredPlan:
    graph = chain_of_dense(layers)
    return dataclasses.replace(to_store(step, propose(graph, TWO, {}), graph), **changes)


def test_the_text_is_stable_and_has_one_layer_and_one_variable_a_line() -> None:
    plan = stored(fingerprint="f")
    rows = tuple(dataclasses.replace(row, time_share=share) for row, share in zip(plan.forecast, SHARES, strict=True))
    file = PlanFile(2, (dataclasses.replace(plan, forecast=rows),))
    assert file.to_json() == TEXT
    assert PlanFile.from_json(TEXT) == file


def test_only_what_several_partitions_use_has_an_owner_of_its_own() -> None:
    graph = chain_of_dense(2)
    plan: Plan = dataclasses.replace(
        propose(graph, TWO, {}),
        owners={"net/table": 1, "net/dense_0/kernel": 0},
        shared=(SharedVariable("net/table", 1, (0,), 64), SharedVariable("net/dense_0/kernel", 0, (), 64)),
    )
    assert to_store("train", plan, graph).shared == {"net/table": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TEXT[:300], r"not JSON, or not all of it is there: .* line \d+"),
        ("[1]", "must hold a JSON object. It holds a list"),
        (TEXT.replace('"version": 4', '"version": 3'), "of version 4. It is of version 3"),
        (TEXT.replace(' "partitions": 2,\n', ""), r"The plan file must have the fields .* Wrong: \['partitions'\]"),
        (
            TEXT.replace('"net/dense_1": 1', '"net/dense_1": "1"'),
            r"'net/dense_1' in units .* must be of type int",
        ),
        (
            TEXT.replace('"net/dense_1": 1', '"net/dense_1": 2'),
            "'net/dense_1' on partition 2, and there are 2: 0 to 1",
        ),
        (
            TEXT.replace('"net/dense_0": 0', '"net/dense_0": 1').replace('"net/dense_1": 1', '"net/dense_1": 0'),
            r"puts 'net/dense_1' on partition 0, after 'net/dense_0' on partition 1.*cannot come back",
        ),
        (TEXT.replace("    1\n   ],", "    2\n   ],"), r"chunks on partitions \[0, 2\], and there are 2"),
        (
            TEXT.replace("    1\n   ],", "    1,\n    0\n   ],").replace('"net/dense_1": 1', '"net/dense_1": 3'),
            "on chunk 3",
        ),
        (TEXT.replace('"shared": {}', '"shared": {"net/w": 5}', 1), "'net/w' on partition 5"),
        # Bugs: partitions were counted one by one, and so were chunks without a layer.
        (
            TEXT.replace('"partitions": 2,', '"partitions": 1000000000000000000,').replace(
                "    1\n   ],", "    -1\n   ],"
            ),
            r"chunks on partitions \[0, -1\], and there are 1000000000000000000",
        ),
        (TEXT.replace("    1\n   ],", "    1" + ",\n    0" * 99 + "\n   ],"), "It has 101 chunks, and 2 layers"),
    ],
)
def test_a_damaged_file_is_refused_with_what_is_wrong(text: str, said: str) -> None:
    assert text != TEXT
    with pytest.raises(PlacementError, match=said):
        PlanFile.from_json(text)


def test_what_was_moved_by_hand_is_known() -> None:
    plan = stored(4, units={f"net/dense_{n}": chunk for n, chunk in enumerate((0, 0, 1, 1))})
    plan = dataclasses.replace(
        plan, shared={"net/table": 0}, planned=Planned(("net/dense_0", "net/dense_2"), {"net/table": 0})
    )
    assert plan.moved() == {}
    by_hand = {f"net/dense_{n}": chunk for n, chunk in enumerate((0, 0, 0, 1))}
    assert dataclasses.replace(plan, units=by_hand, shared={"net/table": 1}).moved() == {
        "net/dense_2": (1, 0),
        "net/table": (0, 1),
    }
    by_hand = {f"net/dense_{n}": chunk for n, chunk in enumerate((0, 1, 1, 1))}
    assert dataclasses.replace(plan, units=by_hand).moved() == {"net/dense_1": (0, 1)}


def find(file: PlanFile, graph: OpGraph, step: str = "train", fingerprint: str = "of this step") -> StoredPlan:
    return file.plan_for(step, graph, units_of(graph), fingerprint)


def test_a_step_finds_the_plan_of_its_fingerprint_whatever_it_is_called() -> None:
    file = PlanFile(2, (stored(3, fingerprint="a"), stored(2, "other", fingerprint="b"), stored(2, fingerprint="c")))
    assert find(file, chain_of_dense(2), fingerprint="b").step == "other"
    assert find(file, chain_of_dense(2), fingerprint="c") is file.plans[2]


def test_batches_of_another_size_find_the_plan_of_the_same_layers_first_that_of_the_same_name() -> None:
    file = PlanFile(2, (stored(3), stored(2, "evaluate"), stored(2, "train")))
    assert find(file, chain_of_dense(2, batch=64)) is file.plans[2]
    assert find(file, chain_of_dense(2, batch=64), step="renamed") is file.plans[1]


@pytest.mark.parametrize(
    ("planned", "changes", "said"),
    [
        (2, {}, r"another model: it does not know the layer 'net/dense_2' \(the plan of step 'train' was looked at"),
        (4, {}, "it has the layer 'net/dense_3', which the model has not"),
        (
            3,
            {"units": {"net/dense_1": 0, "net/dense_0": 0, "net/dense_2": 1}},
            "has the layer 'net/dense_1' before 'net/dense_0', whose data it needs in the model",
        ),
        (3, {"variables": {}}, "does not know the variable 'net/dense_0/kernel'"),
        (
            3,
            {"variables": {f"net/dense_{i}/kernel": "float32[8,9]" for i in range(3)}},
            r"'net/dense_0/kernel' is float32\[8,9\] in it, and float32\[8,8\] in the model",
        ),
        (
            3,
            {"variables": {f"net/dense_{i}/{w}": "float32[8,8]" for w in ("kernel", "bias") for i in range(3)}},
            "has the variable 'net/dense_0/bias', which the model has not",
        ),
    ],
)
def test_a_plan_of_another_model_is_refused_with_what_differs(planned: int, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PlacementError, match=said):
        find(PlanFile(2, (stored(planned, **changes),)), chain_of_dense(3))


def test_the_plan_that_is_most_like_the_step_is_the_one_that_is_compared() -> None:
    file = PlanFile(2, (stored(2, "a"), stored(5, "b"), stored(4, "c")))
    with pytest.raises(PlacementError, match=r"layer 'net/dense_5' \(the plan of step 'b' was looked at for step 'x'"):
        find(file, chain_of_dense(6), step="x")
    with pytest.raises(PlacementError, match="It holds no plan"):
        find(PlanFile(2, ()), chain_of_dense(2))


def test_every_field_of_a_stored_plan_comes_back() -> None:
    plan = stored(4, shared={"net/w": 1})
    assert PlanFile.from_json(PlanFile(2, (plan, plan)).to_json()).plans == (plan, plan)
    assert json.loads(PlanFile(2, (plan,)).to_json())["plans"][0]["units"] == plan.units
    assert len(build_units(chain_of_dense(4))) == len(plan.units) + 1
