"""The file of plans: its text, what is refused of it, and which plan a step finds in it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from smp_tf.partition.errors import PlacementError
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.plan.plan import Plan, SharedVariable
from smp_tf.partition.plan.plan_file import PlanFile, Planned, StoredPlan, to_store
from smp_tf.partition.units.units import build_units
from smp_tf.pipeline.planner.proposal import propose
from smp_tf.pipeline.planner.request import Aim, Course, PlacementRequest, Storage
from smp_tf.pipeline.planner.units import units_of
from tests.partition.op_graph_builder import chain_of_dense

TWO = PlacementRequest(Course("simple", 2, 2), Storage(slots=0.0), Aim("memory"))

SHARES = (0.25, 0.75)
TEXT = """{
 "version": 5,
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
    "placement": [
     0,
     1
    ],
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
        ("[1]", r"must hold a JSON object\. It holds a list\.$"),
        (TEXT.replace('"version": 5', '"version": 4'), "of version 5. It is of version 4"),
        (
            TEXT.replace(' "partitions": 2,\n', ""),
            r"^The plan file must have the fields 'partitions', 'plans'\. Missing: 'partitions'\.$",
        ),
        (TEXT.replace('"step"', '"stop"'), r"^Entry 1 of 'plans' of the .* Missing: 'step'\. Unknown: 'stop'\.$"),
        (
            TEXT.replace('"net/dense_1": 1', '"net/dense_1": "1"'),
            r"^'net/dense_1' in 'units' of entry 1 of 'plans' of the plan file must be a whole number\. Received: the "
            r'text "1"\.$',
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
            TEXT.replace('"partitions": 2,', '"partitions": 100000,').replace("    1\n   ],", "    -1\n   ],"),
            r"chunks on partitions \[0, -1\], and there are 100000: 0 to 99999",
        ),
        (
            TEXT.replace('"partitions": 2,', '"partitions": 100001,'),
            "at least 1, and at most 100,000. Received: 100001",
        ),
        (TEXT.replace('"partitions": 2,', '"partitions": -1,'), "at least 1, and at most 100,000. Received: -1"),
        (TEXT.replace("    1\n   ],", "    1" + ",\n    0" * 99 + "\n   ],"), "It has 101 chunks, and 2 layers"),
    ],
)
def test_a_damaged_file_is_refused_with_what_is_wrong(text: str, said: str) -> None:
    assert text != TEXT
    with pytest.raises(PlacementError, match=said):
        PlanFile.from_json(text)


@pytest.mark.parametrize(
    ("there", "slip", "said"),
    [
        (
            '"shared": {},\n   "planned"',
            '"shared": {"net/nonsense": 0},\n   "planned"',
            "'shared' of entry 1 of 'plans' of the plan file names 'net/nonsense', which is none of its 'variables'",
        ),
        (
            '"net/dense_0": 0',
            '"net/dense_0": 0, "net/dense_0": 1',
            "'units' of entry 1 of 'plans' of the plan file has 'net/dense_0' 2 times, and a name may be there once",
        ),
        ('"partitions": 2', '"partitions": 3, "partitions": 2', "It has 'partitions' 2 times"),
        (
            "0.25",
            "NaN",
            "'time_share' of entry 1 of 'forecast' of entry 1 of 'plans' of the plan file is NaN, which is no",
        ),
        ("0.25", "-Infinity", "is -Infinity, which is no number in JSON"),
        ("0.25", "1e999", "is a number that is too large: 1e999"),
        ("0.25", "1" + 400 * "0", "is a number that is too large: 1000"),
        ('"net/dense_1": 1', '"net/dense_1": 1' + 5000 * "0", r"is a number that is too large: 10{59}\.\.\.\.$"),
        ('"version": 5', '"version": 5.0', "It says the number 5.0 of its version"),
        ('"version": 5', '"version": NaN', "'version' of the plan file is NaN, which is no number in JSON"),
        ('"microbatches": 2', '"microbatches": 0', "'microbatches' of entry 1 .* must be at least 1. Received: 0"),
        ('"pipeline": "simple"', '"pipeline": ""', "'pipeline' of entry 1 .* must be a schedule"),
        ('"optimize": "memory"', '"optimize": "time"', "must be 'memory' or 'speed'. Received: the text \"time\""),
    ],
)
def test_a_slip_of_the_hand_is_refused_in_a_line(there: str, slip: str, said: str) -> None:
    """Bugs: each was taken without a word, or ended in a traceback."""
    assert TEXT.count(there) == 1
    with pytest.raises(PlacementError, match=said) as raised:
        PlanFile.from_json(TEXT.replace(there, slip))
    assert "\n" not in str(raised.value)


def test_two_plans_for_one_step_are_refused() -> None:
    plan = stored(fingerprint="a")
    other = dataclasses.replace(plan, units={"net/dense_0": 0, "net/dense_1": 0})
    with pytest.raises(PlacementError) as raised:
        PlanFile.from_json(PlanFile(2, (stored(step="x"), plan, other)).to_json())
    assert str(raised.value) == (
        "Entries 2 and 3 of 'plans' are both for step 'train', with the same fingerprint. Leave one of them."
    )


def test_what_no_plan_file_is_as_large_as_is_not_read() -> None:
    with pytest.raises(PlacementError, match="It is larger than 16777216 bytes, which no plan file is"):
        PlanFile.from_json(" " * 2**24 + TEXT)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("null", "nothing"),
        ("true", "true"),
        ("1.5", "the number 1.5"),
        ("[0]", "a list"),
        ('{"a": 0}', "an object"),
        (r'"a\nb"', r'the text "a\nb"'),
        ('"ä"', 'the text "ä"'),
        (f'"{"x" * 5000}"', f'the text "{"x" * 59}...'),
    ],
)
def test_what_was_received_is_said_in_the_words_of_json(value: str, words: str) -> None:
    with pytest.raises(PlacementError) as raised:
        PlanFile.from_json(TEXT.replace('"net/dense_1": 1', f'"net/dense_1": {value}'))
    assert str(raised.value).endswith(f"must be a whole number. Received: {words}.")
    with pytest.raises(PlacementError) as raised:
        PlanFile.from_json(value)
    no_object, no_version = f"It must hold a JSON object. It holds {words}.", "It says nothing of its version."
    assert str(raised.value).endswith(no_version if words == "an object" else no_object)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("step", "1", "a text"),
        ("recompute", "1", "true or false"),
        ("placement", "{}", "a list"),
        ("variables", "[]", "an object"),
        ("planned", "[]", "an object"),
    ],
)
def test_what_is_expected_is_said_in_the_words_of_json(field: str, value: str, expected: str) -> None:
    whole = json.loads(TEXT)
    whole["plans"][0][field] = json.loads(value)
    with pytest.raises(
        PlacementError, match=rf"^'{field}' of entry 1 of 'plans' of the plan file must be {expected}\."
    ):
        PlanFile.from_json(json.dumps(whole))


def test_files_of_other_editors_are_read() -> None:
    file = PlanFile.from_json(TEXT)
    assert PlanFile.from_json("\ufeff" + TEXT) == PlanFile.from_json(TEXT.replace("\n", "\r\n")) == file


def test_what_was_moved_by_hand_is_said() -> None:
    plan = stored(4, units={f"net/dense_{n}": chunk for n, chunk in enumerate((0, 0, 1, 1))})
    plan = dataclasses.replace(
        plan, shared={"net/table": 0}, planned=Planned((0, 1), ("net/dense_0", "net/dense_2"), {"net/table": 0})
    )
    assert plan.moved() == ()
    by_hand = {f"net/dense_{n}": chunk for n, chunk in enumerate((0, 0, 0, 1))}
    assert dataclasses.replace(plan, units=by_hand, shared={"net/table": 1, "net/w": 0}).moved() == (
        "net/dense_2 from partition 1 to 0",
        "net/table from partition 0 to 1",
        "net/w to partition 0",
    )
    by_hand = {f"net/dense_{n}": chunk for n, chunk in enumerate((0, 1, 1, 1))}
    assert dataclasses.replace(plan, units=by_hand).moved() == ("net/dense_1 from partition 0 to 1",)
    # Bug: of chunks that were moved to other partitions nothing was said.
    assert dataclasses.replace(plan, units=by_hand, placement=(1, 0)).moved() == (
        "chunk 0 from partition 0 to 1",
        "chunk 1 from partition 1 to 0",
        "net/dense_1 from chunk 0 to 1",
    )
    assert dataclasses.replace(plan, placement=(0, 1, 0)).moved() == ("the chunks from partitions [0, 1] to [0, 1, 0]",)


def tied(**changes: Any) -> tuple[OpGraph, StoredPlan]:
    """Four layers on two partitions, of which the first and the last share a kernel."""
    graph = chain_of_dense(4, tied=(0, 3))
    plan = to_store("train", propose(graph, TWO, {}), graph)
    units = dict(zip(plan.units, changes.pop("chunks", plan.units.values()), strict=True))
    return graph, dataclasses.replace(plan, units=units, **changes)


KERNEL = "net/dense_0/kernel"


def test_an_owner_that_is_left_out_is_asked_for() -> None:
    graph, plan = tied()
    assert plan.shared == plan.planned.shared == {KERNEL: 0}
    assert find(PlanFile(2, (plan,)), graph) is plan
    graph, plan = tied(shared={})
    with pytest.raises(PlacementError) as raised:
        find(PlanFile(2, (plan,)), graph)
    assert str(raised.value) == (
        f"It does not say in 'shared' where {KERNEL!r} is stored, which layers of partitions 0 and 1 use. It was "
        f"planned on partition 0."
    )


def test_an_owner_that_has_no_use_of_the_variable_is_refused() -> None:
    graph, plan = tied(shared={KERNEL: 0, "net/dense_1/kernel": 1}, chunks=(0, 0, 1, 1))
    with pytest.raises(PlacementError) as raised:
        find(PlanFile(2, (plan,)), graph)
    assert str(raised.value) == (
        "It gives 'net/dense_1/kernel' to partition 1, whose layers do not use it. Those of partition 0 do."
    )
    assert find(PlanFile(2, (tied(shared={KERNEL: 1})[1],)), graph).shared == {KERNEL: 1}


def test_a_variable_goes_with_its_layers_when_they_are_moved_together() -> None:
    three = TWO.changed(stages=3)
    graph = chain_of_dense(4, tied=(2, 3))
    plan = to_store("train", propose(graph, three, {}), graph)
    plan = dataclasses.replace(
        plan, units=dict(zip(plan.units, (0, 0, 1, 2), strict=True)), shared={"net/dense_2/kernel": 1}
    )
    plan = dataclasses.replace(
        plan, planned=Planned((0, 1, 2), ("net/dense_0", "net/dense_2", "net/dense_3"), plan.shared)
    )
    assert find(PlanFile(3, (plan,)), graph) is plan
    moved = dataclasses.replace(plan, units=dict(zip(plan.units, (0, 1, 2, 2), strict=True)))
    assert find(PlanFile(3, (moved,)), graph) is moved
    # An owner that was said by hand is not one that was left behind.
    moved = dataclasses.replace(moved, shared={"net/dense_2/kernel": 0})
    with pytest.raises(PlacementError, match=r"to partition 0, whose layers do not use it\. Those of partition 2 do"):
        find(PlanFile(3, (moved,)), graph)


def test_an_owner_that_an_earlier_step_has_decided_needs_no_use() -> None:
    """As a later step has it, none of whose layers on that partition use the variable."""
    three, graph = TWO.changed(stages=3), chain_of_dense(4, tied=(1, 3))
    plan = to_store("train", propose(graph, three, {}), graph)
    units = dict(zip(plan.units, (0, 1, 1, 2), strict=True))
    planned = Planned((0, 1, 2), ("net/dense_0", "net/dense_1", "net/dense_3"), {"net/dense_1/kernel": 0})
    plan = dataclasses.replace(plan, units=units, shared={"net/dense_1/kernel": 0}, planned=planned)
    assert find(PlanFile(3, (plan,)), graph) is plan


def test_a_partition_without_a_layer_is_refused() -> None:
    graph, plan = tied(chunks=(0, 0, 0, 0))
    with pytest.raises(PlacementError, match=r"^It puts no layer on partition 1 of 2\. Every partition needs one\.$"):
        find(PlanFile(2, (plan,)), graph)
    with pytest.raises(PlacementError, match="no layer on partition 2 of 3"):
        find(PlanFile(3, (tied()[1],)), graph)


def test_a_step_of_a_part_of_the_models_leaves_partitions_empty_and_is_written_and_read() -> None:
    """Bug: a plan with a chunk without a layer could not be written."""
    graph = chain_of_dense(3)
    plan = to_store("train", propose(graph, TWO, {0: 1, 1: 1, 2: 1}), graph)
    assert plan.planned == Planned((0, 1), ("", "net/dense_0"), {})
    assert plan.moved() == ()
    [read] = PlanFile.from_json(PlanFile(2, (plan,)).to_json()).plans
    assert find(PlanFile(2, (read,)), graph) == plan


@pytest.mark.parametrize(
    ("planned", "said"),
    [
        (
            Planned((0, 1), ("net/dense_0", "net/x"), {}),
            "names the layer 'net/x', which the model has not. Leave it as",
        ),
        (Planned((0, 1), ("net/dense_0",), {}), "names the first layers of 1 chunks, of 2"),
        (Planned((), (), {}), "names the first layers of 0 chunks, of 0"),
        (Planned((0, 1), ("net/dense_0", "net/dense_1"), {"w": 0}), "names the variable 'w', which the model has not"),
        (Planned((0, 5), ("net/dense_0", "net/dense_1"), {}), "names partition 5, of 2"),
        (
            Planned((0, 1), ("net/dense_1", "net/dense_0"), {}),
            "names 'net/dense_0' as the first layer of a chunk after",
        ),
        (Planned((0, 1), ("net/dense_0", "net/dense_1"), {"net/dense_0/kernel": 2}), "names chunk 2, of 2"),
    ],
)
def test_what_was_planned_is_not_to_be_changed(planned: Planned, said: str) -> None:
    with pytest.raises(PlacementError, match=f"'planned' of the plan of step 'train' {said}"):
        find(PlanFile(2, (stored(planned=planned),)), chain_of_dense(2))


def find(file: PlanFile, graph: OpGraph, step: str = "train", fingerprint: str = "of this step") -> StoredPlan:
    return file.plan_for(step, graph, units_of(graph), fingerprint)


def test_a_step_finds_the_plan_of_its_fingerprint_whatever_it_is_called() -> None:
    file = PlanFile(2, (stored(3, fingerprint="a"), stored(2, "other", fingerprint="b"), stored(2, fingerprint="c")))
    assert find(file, chain_of_dense(2), fingerprint="b").step == "other"
    assert find(file, chain_of_dense(2), fingerprint="c") is file.plans[2]
    # Bug: of two steps of one fingerprint the second got the plan of the first.
    file = PlanFile(2, (stored(step="first", fingerprint="a"), stored(step="second", fingerprint="a")))
    assert [find(file, chain_of_dense(2), step, "a").step for step in ("first", "second", "third")] == [
        "first",
        "second",
        "first",
    ]


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
            {"units": {"net/dense_0": 0, "net/Dense_1": 0, "net/dense_2": 1}},
            "it does not know the layer 'net/dense_1', and has 'net/Dense_1', which the model has not",
        ),
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
    plan = stored(4, shared={"net/dense_3/kernel": 1})
    both = plan, dataclasses.replace(plan, step="evaluate")
    assert PlanFile.from_json(PlanFile(2, both).to_json()).plans == both
    assert json.loads(PlanFile(2, (plan,)).to_json())["plans"][0]["units"] == plan.units
    assert len(build_units(chain_of_dense(4))) == len(plan.units) + 1
