"""The plan as data, as text, and as a table."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from smp_tf.partition.errors import PlacementError
from smp_tf.partition.place.placement import Chain, Chunks
from smp_tf.partition.place.solve_chain import solve_chain
from smp_tf.partition.plan.held_memory import HeldMemory
from smp_tf.partition.plan.plan import MAX_BYTES, Plan, SharedVariable, Terms, as_bytes, make_plan
from smp_tf.partition.plan.report import layer_names, reasons, remarks, render
from smp_tf.partition.plan.stage_forecast import Memory, StageForecast, Traffic, Use
from smp_tf.partition.units.cost import estimate
from smp_tf.partition.units.units import build_units
from tests.partition.op_graph_builder import chain_of_dense
from tests.partition.uses_on_host import with_on_host


def small_plan(**changes: Any) -> Plan:
    memory = {Use.WEIGHTS: 512, Use.GRADIENTS: 512, Use.SLOTS: 1024, Use.STASH: 512, Use.WORK: 64}
    row = StageForecast(2, 128, Memory(dict(memory)), 2, 0.5, Traffic(128, 0, 1, 0))
    plan = Plan(
        stages=2,
        microbatches=4,
        schedule="interleaved",
        objective="memory",
        fingerprint="0" * 64,
        placement=(0, 1),
        units={
            "net/embedding": 0,
            "net/block_0/mlp": 0,
            "net/block_1/mlp": 1,
            "loss and outputs": 1,
        },
        owners={"net/embedding/table": 0},
        shared=(SharedVariable("net/embedding/table", 0, (1,), 3 * 2**20),),
        forecast=(row, dataclasses.replace(row, in_flight=1, traffic=Traffic(0, 2048, 1, 0))),
        defaulted=("Frobnicate",),
        reasons=(),
    )
    return dataclasses.replace(plan, **changes)


def test_a_plan_survives_json() -> None:
    plan = small_plan()
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()
    assert '"net/block_0/mlp": 0,\n' in plan.to_json()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 99}, "reads plans of version 6. Received: version 99"),
        ({"stages": "2"}, "'stages' of the plan must be a whole number. Received: the text \"2\""),
        ({"stages": True}, "'stages' of the plan must be a whole number. Received: true"),
        ({"units": {"net": 5}}, "must name chunks 0 to 1. Received: 5"),
        ({"owners": {"w": -1}}, "must name chunks 0 to 1. Received: -1"),
        ({"placement": [0, 2]}, r"must have chunks on stages 0 to 1 and forecast each. Received: chunks on \(0, 2\)"),
        ({"forecast": []}, None),
        ({"forecast": [{"units": 1}]}, "entry 1 of 'forecast' of the plan must have the fields"),
        ({"units": ["net"]}, "'units' of the plan must be an object. Received: a list"),
        ({"unheard_of": 1}, "Unknown: 'unheard_of'"),
    ],
)
def test_a_wrong_plan_is_refused(change: dict[str, Any], said: str | None) -> None:
    fields = json.loads(small_plan().to_json()) | change
    if said is None:
        assert Plan.from_json(json.dumps(fields)).forecast == ()
        return
    with pytest.raises(PlacementError, match=f"(?i){said}"):
        Plan.from_json(json.dumps(fields))


def test_what_is_no_plan_is_refused() -> None:
    with pytest.raises(PlacementError, match="must be JSON"):
        Plan.from_json("{")
    with pytest.raises(PlacementError, match="must be a JSON object"):
        Plan.from_json("[]")
    with pytest.raises(PlacementError, match=f"at most {MAX_BYTES} bytes"):
        Plan.from_json(" " * (MAX_BYTES + 1))
    with pytest.raises(PlacementError, match="must be JSON"):
        Plan.from_json("[" * 100000)


def made(
    stages: int = 2,
    layers: int = 4,
    objective: str = "memory",
    speed: tuple[float, ...] | None = None,
    slot_shares: int = 1,
    width: int = 8,
) -> Plan:
    graph = chain_of_dense(layers, width)
    units = build_units(graph)
    costs = estimate(graph, units, slots=2.0 / slot_shares, microbatches=4)
    chain = Chain.of([u.name for u in units], costs, manual=[u.stage for u in units])
    in_flight = [min(stages - r, 4) for r in range(stages)]
    solution = solve_chain(chain, stages, objective=objective, microbatches=4, in_flight=in_flight)
    return make_plan(
        graph,
        units,
        costs,
        solution,
        Terms(Chunks.one_each(in_flight), 4, "interleaved", objective, speed, slot_shares),
        fingerprint="f",
    )


@pytest.mark.parametrize(
    ("shares", "slots"), [(1, 3 * 512), (2, 2 * 512), (3, 512), (4, 512)], ids=["all", "unequal", "one each", "none"]
)
def test_shared_slots_count_as_those_of_the_largest_share(shares: int, slots: int) -> None:
    [only] = made(stages=1, layers=3, slot_shares=shares).forecast
    assert (only.weight_bytes, only.slot_bytes) == (3 * 256, slots)


@pytest.mark.parametrize(
    ("shares", "kib"),
    [
        (1, 3 * 2 * 256),
        # One kernel each, and half of the slots of the third.
        (2, 2 * 256 + 2 * 128),
        (3, 2 * 256),
        # One has nothing, and the others too little too much.
        (4, 2 * 256),
        # 153.6 rows each of three times 256, which are 154 for some.
        (5, 2 * 154),
    ],
    ids=["all", "one is cut", "one each", "not worth it", "all are cut"],
)
def test_shared_slots_count_as_those_of_rows_where_weights_are_cut(shares: int, kib: int) -> None:
    """Of kernels of 256 KiB, in rows of 1 KiB."""
    [only] = made(stages=1, layers=3, slot_shares=shares, width=256).forecast
    assert (only.weight_bytes, only.slot_bytes) == (3 * 256 * 1024, kib * 1024)


def test_every_stage_shares_its_own_slots() -> None:
    first, last = made(stages=2, layers=3, slot_shares=2, width=256).forecast
    # Two kernels, one for each replica, on one stage, and on the other one that is cut.
    assert sorted([first.slot_bytes, last.slot_bytes]) == [2 * 128 * 1024, 2 * 256 * 1024]


def test_the_time_of_a_stage_is_that_of_its_rank() -> None:
    alike, slow = made().forecast, made(speed=(1.0, 0.25)).forecast
    as_long = alike[1].time_share / alike[0].time_share
    assert slow[1].time_share / slow[0].time_share == pytest.approx(4 * as_long, rel=1e-2)


def test_the_forecast_counts_what_the_stages_hold_and_send() -> None:
    plan = made()
    assert plan.units == {
        "net/dense_0": 0,
        "net/dense_1": 0,
        "net/dense_2": 1,
        "net/dense_3": 1,
        "loss and outputs": 1,
    }
    assert plan.owners == {f"net/dense_{i}/kernel": i // 2 for i in range(4)}
    first, last = plan.forecast
    assert first == StageForecast(
        units=2,
        parameters=128,
        memory=Memory({Use.WEIGHTS: 512, Use.GRADIENTS: 512, Use.SLOTS: 1024, Use.STASH: 2 * 2 * 128}),
        in_flight=2,
        time_share=first.time_share,
        traffic=Traffic(sent_forward=128, sent_backward=0, messages_forward=1, messages_backward=0),
        largest="net/dense_1",
        largest_share=0.5455,
    )
    assert (last.in_flight, last.stash_bytes, last.units) == (1, 3 * 128, 3)
    assert last.traffic == Traffic(sent_forward=0, sent_backward=128, messages_forward=0, messages_backward=1)
    assert first.time_share + last.time_share == pytest.approx(1.0, abs=1e-3)
    assert first.stored_bytes == 512 + 512 + 1024 + 512


def test_what_is_on_the_host_is_not_on_the_device() -> None:
    row, _ = small_plan().forecast
    assert (row.host_bytes, row.device_bytes, row.stored_bytes) == (0, 2624, 2624)
    gradients = with_on_host(row, Use.GRADIENTS)
    assert (gradients.host_bytes, gradients.device_bytes, gradients.stored_bytes) == (512, 2112, 2624)
    both = with_on_host(row, Use.GRADIENTS, Use.SLOTS)
    assert (both.host_bytes, both.device_bytes, both.stored_bytes) == (1536, 1088, 2624)


def test_a_plan_places_the_units_of_another_trace_by_name() -> None:
    plan = made()
    assert plan.stages_of(build_units(chain_of_dense(3))) == (0, 0, 1, 1)
    with pytest.raises(PlacementError, match="does not say where 'net/dense_4' goes"):
        plan.stages_of(build_units(chain_of_dense(5)))


def test_what_ranks_held_in_an_earlier_training_is_told_below_the_table() -> None:
    held = (HeldMemory(812 * 2**20, 0, 0, 790 * 2**20), HeldMemory(3 * 2**30, 0, 0, 2**20, is_resident=True))
    plan = small_plan(earlier=held)
    assert Plan.from_json(plan.to_json()) == plan
    assert [line for line in remarks(plan) if line.startswith("memory: ")] == [
        "memory: rank 0 held 812.0 MiB at most in an earlier training; forecast 790.0 MiB",
        "memory: rank 1 held 3.0 GiB at most in an earlier training, graphs and code included; forecast 1.0 MiB",
    ]
    with pytest.raises(PlacementError, match=r"what it held earlier, or of none\. Received: 1 entries"):
        Plan.from_json(small_plan(earlier=held[:1]).to_json())


def test_plans_with_everything_in_the_same_places_have_the_same_key() -> None:
    plan = small_plan()
    assert small_plan(reasons=("because",), gap=0.5, forecast=()).placement_key == plan.placement_key
    others = [
        small_plan(units={**plan.units, "net/block_1/mlp": 0}),
        small_plan(owners={"net/embedding/table": 1}),
        small_plan(placement=(1, 0)),
        small_plan(schedule="simple"),
        small_plan(microbatches=2),
        small_plan(recompute={"net/embedding": 0}),
    ]
    assert len({each.placement_key for each in (plan, *others)}) == 7


def test_the_fullest_stage_is_named_with_the_unit_that_fills_it() -> None:
    plan = made(stages=3, layers=2, objective="speed")
    assert reasons(plan) == (
        f"stage 1 takes the longest, {plan.forecast[1].time_share:.0%} of the compute time; net/dense_1 is alone there",
    )
    first, last = small_plan().forecast
    last = dataclasses.replace(last, units=3, largest="block_1", largest_share=0.9).with_memory({Use.STASH: 2**20})
    assert reasons(small_plan(forecast=(first, last), reasons=("because",))) == (
        "stage 1 stores the most, 1.0 MiB; block_1 alone is 90% of what layers keep there",
        "because",
    )


def test_the_report() -> None:
    assert render(small_plan(), width=98).splitlines() == [
        "2 partitions, 4 microbatches, interleaved, balanced by stored bytes",
        "┏━━━━━━━┳━━━━━━━━━━━━━━━┳━━━━━━━━━━━━┳━━━━━━━━━━━┳━━━━━━━━━━━┳━━━━━━━━━━━┳━━━━━━┳━━━━━━━━━━━━━━━━┓",
        "┃       ┃               ┃            ┃   weights ┃     stash ┃    memory ┃      ┃           sent ┃",
        "┃ stage ┃ layers        ┃ parameters ┃   + slots ┃ in flight ┃    in all ┃ time ┃ per microbatch ┃",
        "┡━━━━━━━╇━━━━━━━━━━━━━━━╇━━━━━━━━━━━━╇━━━━━━━━━━━╇━━━━━━━━━━━╇━━━━━━━━━━━╇━━━━━━╇━━━━━━━━━━━━━━━━┩",
        "│     0 │ embedding,    │        128 │     512 B │     512 B │   2.6 KiB │  50% │        128 B → │",
        "│       │ block_0       │            │ + 1.0 KiB │       2 × │ estimated │      │                │",
        "│     1 │ block_1, loss │        128 │     512 B │     512 B │   2.6 KiB │  50% │      ← 2.0 KiB │",
        "│       │ and outputs   │            │ + 1.0 KiB │       1 × │ estimated │      │                │",
        "└───────┴───────────────┴────────────┴───────────┴───────────┴───────────┴──────┴────────────────┘",
        "shared weights",
        "┏━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━┳━━━━━━━┳━━━━━━━━━━━┓",
        "┃ weight              ┃    size ┃ stage ┃ copies on ┃",
        "┡━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━╇━━━━━━━╇━━━━━━━━━━━┩",
        "│ net/embedding/table │ 3.0 MiB │     0 │         1 │",
        "└─────────────────────┴─────────┴───────┴───────────┘",
        "shared: once per step a copy is sent the value, and its gradient is sent back",
        "why: stage 0 stores the most, 2.6 KiB",
        "cost guessed for: Frobnicate",
        "workspace not known of: Frobnicate; it counts as much as all that they read and give",
    ]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_report_keeps_to_the_width(width: int) -> None:
    plan = small_plan(units={"net/" + "very_long_layer_name" * 5: 0, "net/b": 1})
    assert max(map(len, render(plan, width).splitlines())) <= width


def test_layers_are_named_in_a_few_words() -> None:
    units = {"net/embedding": 0, "net/a": 0, "net/b/x": 0, "net/b/y": 1, "net/c": 1, "net/d": 2}
    plan = small_plan(stages=3, placement=(0, 1, 2), units=units, forecast=())
    assert layer_names(plan) == ["embedding … b/x (3)", "b/y, c", "d"]


def test_each_run_of_layers_of_a_stage_is_named() -> None:
    plan = small_plan(placement=(0, 1, 0), units={"net/a": 0, "net/b": 1, "net/c": 1, "net/d": 2}, forecast=())
    assert layer_names(plan) == ["a │ d", "b, c"]
    assert plan.stages_of(()) == ()
    assert [plan.stage_of(name) for name in plan.units] == [0, 1, 1, 0]


def test_with_two_models_their_names_are_kept() -> None:
    plan = small_plan(units={"one/a": 0, "one/b": 0, "two/a": 1})
    assert layer_names(plan) == ["one/a, one/b", "two/a"]


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3.1 * 2**30, "3.1 GiB")])
def test_bytes_for_people(count: float, text: str) -> None:
    assert as_bytes(count) == text
