"""The table of a plan: titles, cells, and the lines below it. (A whole table stands in the tests of plans.)"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from smp_tf.partition.place.trade import Offer, Trade
from smp_tf.partition.plan.plan import Plan, SharedVariable
from smp_tf.partition.plan.report import layer_names, remarks, render
from smp_tf.partition.plan.stage_forecast import Memory, Source, StageForecast, Traffic, Use


def row(**values: Any) -> StageForecast:
    """A stage's forecast, with 0 for what is not given."""
    names = {
        "weight_bytes": Use.WEIGHTS,
        "gradient_bytes": Use.GRADIENTS,
        "slot_bytes": Use.SLOTS,
        "stash_bytes": Use.STASH,
    }
    memory = Memory({use: values.pop(name, 0) for name, use in names.items()}, values.pop("on_host", ()))
    sent = ("sent_forward", "sent_backward", "messages_forward", "messages_backward")
    traffic = Traffic(**{name: values.pop(name, 0) for name in sent})
    plain = {name: values.get(name, 0) for name in ("units", "parameters", "in_flight", "time_share", "largest_share")}
    return StageForecast(memory=memory, traffic=traffic, **plain)


def plan_of(*rows: StageForecast, **changes: Any) -> Plan:
    plan = Plan(
        stages=len(rows),
        microbatches=4,
        schedule="simple",
        objective="memory",
        fingerprint="",
        placement=tuple(range(len(rows))),
        units={f"net/layer_{i}": i for i in range(len(rows))},
        owners={},
        shared=(),
        forecast=rows,
        defaulted=(),
        reasons=(),
    )
    return dataclasses.replace(plan, **changes)


def cells(text: str) -> list[list[str]]:
    """The cells of the lines within the table, without its heading."""
    lines = [line for line in text.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def below(text: str) -> list[str]:
    """The lines after the table."""
    lines = text.splitlines()
    return lines[next(i for i, line in enumerate(lines) if line.startswith("└")) + 1 :]


@pytest.mark.parametrize(
    ("stages", "objective", "title"),
    [
        (1, "memory", "1 partition, 4 microbatches, simple, balanced by stored bytes"),
        (3, "speed", "3 partitions, 4 microbatches, simple, balanced by time per microbatch"),
    ],
)
def test_the_title_says_what_was_asked_for(stages: int, objective: str, title: str) -> None:
    assert render(plan_of(*[row()] * stages, objective=objective)).splitlines()[0] == title


def test_a_row_shows_the_forecast_of_its_stage() -> None:
    stage = row(
        parameters=1234567,
        weight_bytes=4938268,
        slot_bytes=2 * 4938268,
        stash_bytes=3 * 2**20,
        in_flight=3,
        time_share=0.256,
        sent_forward=2048,
        sent_backward=512,
    )
    first, second = cells(render(plan_of(stage), width=120))
    assert first[:5] == ["0", "layer_0", "1,234,567", "4.7 MiB", "3.0 MiB"]
    assert first[-2:] == ["26%", "2.0 KiB →"]
    assert second[:6] == ["", "", "", "+ 9.4 MiB", "3 ×", "estimated"]
    assert second[-1] == "← 512 B"


@pytest.mark.parametrize("width", [76, 95, 96])
def test_a_narrow_table_has_fewer_columns_and_all_of_each(width: int) -> None:
    stage = row(
        parameters=1234567,
        weight_bytes=150 * 2**20,
        slot_bytes=300 * 2**20,
        stash_bytes=100 * 2**20,
        sent_forward=100 * 2**20,
    )
    text = render(plan_of(stage, stage), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    first = cells(text)[0]
    assert first[:2] == ["0", "layer_0"]
    assert first[2:4] == (["150.0 MiB", "100.0 MiB"] if width < 96 else ["1,234,567", "150.0 MiB"])
    assert first[-1] == "100.0 MiB →"


@pytest.mark.parametrize(
    ("forward", "backward", "shown"), [(0, 0, ["-", ""]), (8, 0, ["8 B →", ""]), (0, 8, ["← 8 B", ""])]
)
def test_only_what_is_sent_is_shown(forward: int, backward: int, shown: list[str]) -> None:
    text = render(plan_of(row(sent_forward=forward, sent_backward=backward)), width=120)
    assert [line[-1] for line in cells(text)] == shown


def test_rows_are_in_the_order_of_the_stages() -> None:
    text = render(plan_of(row(parameters=1), row(parameters=2), row(parameters=3)), width=120)
    assert [line[:3] for line in cells(text) if line[0]] == [
        ["0", "layer_0", "1"],
        ["1", "layer_1", "2"],
        ["2", "layer_2", "3"],
    ]


def test_shared_weights_reasons_and_guesses_are_said_below() -> None:
    text = render(
        plan_of(
            row(),
            row(),
            shared=(
                SharedVariable("net/table", 0, (1, 2), 2**20),
                SharedVariable("net/scale", 1, (), 4),
            ),
            reasons=("because", "and [so] on"),
            defaulted=("One", "Two", "While (taken to run 16 times)"),
        ),
        width=200,
    )
    assert below(text) == [
        "shared weights",
        "┏━━━━━━━━━━━┳━━━━━━━━━┳━━━━━━━┳━━━━━━━━━━━┓",
        "┃ weight    ┃    size ┃ stage ┃ copies on ┃",
        "┡━━━━━━━━━━━╇━━━━━━━━━╇━━━━━━━╇━━━━━━━━━━━┩",
        "│ net/table │ 1.0 MiB │     0 │      1, 2 │",
        "│ net/scale │     4 B │     1 │         - │",
        "└───────────┴─────────┴───────┴───────────┘",
        "shared: once per step a copy is sent the value, and its gradient is sent back",
        "why: stage 0 stores the most, 0 B",
        "why: because",
        "why: and [so] on",  # brackets are no markup
        "cost guessed for: One, Two, While (taken to run 16 times)",
        "workspace not known of: One, Two; it counts as much as all that they read and give",
    ]


def test_of_layers_that_were_measured_no_workspace_is_guessed() -> None:
    measured = [dataclasses.replace(row(), source=source) for source in (Source.PROFILE, Source.TRAINING)]
    assert "cost guessed for: One" in remarks(plan_of(*measured, defaulted=("One",)))
    assert not any("workspace" in line for line in remarks(plan_of(*measured, defaulted=("One",))))
    assert any("workspace" in line for line in remarks(plan_of(*measured, row(), defaulted=("One",))))


def trade(**changes: Any) -> Trade:
    balanced, taken = Offer(2.0 * 2**30, 60.0 * 2**20, 2.5), Offer(2.0625 * 2**30, 24.0 * 2**20, 0.25)
    told = Trade(0.05, balanced, taken, Offer(3.0 * 2**30, 12.0 * 2**20, 5.0), taken.sent, taken.sent)
    return dataclasses.replace(told, **changes)


def test_what_was_given_up_for_fewer_bytes_is_a_table_with_what_is_proved() -> None:
    text = render(plan_of(row(), row(), trade=trade(), gap=0.0), width=120)
    assert below(text) == [
        "balance and bytes sent, before the cut",
        "┏━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━┳━━━━━━━━┓",
        "┃               ┃               ┃           sent ┃        ┃",
        "┃ placement     ┃ fullest stage ┃ per microbatch ┃   step ┃",
        "┡━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━╇━━━━━━━━┩",
        "│ best balanced │       2.0 GiB │       60.0 MiB │ 2.50 s │",
        "│ taken         │       2.1 GiB │       24.0 MiB │ 250 ms │",
        "│ sends least   │       3.0 GiB │       12.0 MiB │ 5.00 s │",
        "└───────────────┴───────────────┴────────────────┴────────┘",
        "why: stage 0 stores the most, 0 B",
        "proved: no placement has less on its fullest stage than the best balanced one, of weights, gradients, slots "
        "and stash",
        "sent: 24.0 MiB a microbatch, both ways; no placement within 5% of the best balance sends less",
    ]


def test_placements_that_offer_the_same_share_a_row() -> None:
    same = trade().taken
    told = plan_of(row(), row(), trade=trade(least=same), gap=0.01, objective="speed")
    assert [line[0] for line in cells(render(told, width=120))][4:] == ["best balanced", "taken, sends least"]
    told = plan_of(row(), row(), trade=trade(balanced=same), gap=0.01, objective="speed")
    assert len(cells(render(told, width=120))) == 4  # nothing was traded, so there is no table
    assert remarks(told)[-2:] == [
        "proved: any other placement makes the step at most 1.0% shorter, by the times of layers",
        "sent: 24.0 MiB a microbatch, both ways; no placement within 5% of the best balance sends less",
    ]


@pytest.mark.parametrize(
    ("bound", "of_cuts", "said"),
    [
        (24.0, 24.0, "; no placement within 5% of the best balance sends less"),
        (
            18.0,
            24.0,
            "; no cut in the order of the layers within 5% of the best balance sends less; no placement within 5% of "
            "the best balance sends less than 18.0 MiB",
        ),
        (None, 24.0, "; no cut in the order of the layers within 5% of the best balance sends less"),
        (None, 23.0, "; no cut in the order of the layers within 5% of the best balance sends less than 23.0 MiB"),
        (None, None, "; of fewer bytes nothing is proved"),
    ],
)
def test_what_is_proved_of_fewer_bytes_is_said(bound: float | None, of_cuts: float | None, said: str) -> None:
    known = trade(bound=bound and bound * 2**20, bound_of_cuts=of_cuts and of_cuts * 2**20)
    assert remarks(plan_of(row(), row(), trade=known))[-1] == f"sent: 24.0 MiB a microbatch, both ways{said}"


def test_nothing_is_said_below_where_there_is_nothing_to_say() -> None:
    assert below(render(plan_of(row()))) == []


def test_color_is_only_where_it_was_asked_for() -> None:
    assert "\x1b[" in render(plan_of(row()), color=True)
    assert "\x1b[" not in render(plan_of(row()))


@pytest.mark.parametrize(
    ("units", "names"),
    [
        ({"net/a": 0}, ["a"]),
        ({"net": 0}, ["net"]),
        ({"net": 0, "net #2": 1}, ["net", "net #2"]),
        ({"net/a": 0, "net/b": 0}, ["a, b"]),
        ({"net/a": 0, "net/b": 0, "net/c": 0}, ["a … c (3)"]),
        ({"net/a/x": 0, "net/a/y": 0, "net/b": 0}, ["a, b (3)"]),
        ({"net/a/x": 0, "net/a/y": 1, "net/b": 1}, ["a/x", "a/y, b"]),
        ({"net/a/p/x": 0, "net/a/p/y": 0, "net/a/q/x": 0, "net/a/q/y": 1, "net/b": 1}, ["a/p, a/q/x (3)", "a/q/y, b"]),
        ({"wrapped/net/x": 0, "wrapped/net/y": 1, "wrapped/net/z": 1}, ["x", "y, z"]),
        ({"wrapped/net/x": 0, "loss and outputs": 1}, ["x", "loss and outputs"]),
        ({"net/a + net/b": 0, "net/c": 1}, ["a", "c"]),
        ({"net/a": 0, "loss and outputs": 1}, ["a", "loss and outputs"]),
        ({"net/a": 1}, ["-", "a"]),
        ({"one/a/x": 0, "one/a/y": 0, "two/b/z": 1}, ["one/a (2)", "two/b"]),
    ],
)
def test_layers_are_named_in_a_few_words(units: dict[str, int], names: list[str]) -> None:
    assert layer_names(plan_of(*[row()] * len(names), units=units)) == names


@pytest.mark.parametrize(
    ("slots", "said"),
    [
        (False, "on the host: gradients, 3.0 KiB of stage 0, 1.0 KiB of stage 1; memory in all is"),
        (True, "on the host: gradients and slots, 5.0 KiB of stage 0, 1.0 KiB of stage 1; memory in all is"),
    ],
)
def test_what_is_on_the_host_is_told_below_and_is_not_in_the_table(slots: bool, said: str) -> None:
    on_host = (Use.GRADIENTS, Use.SLOTS) if slots else (Use.GRADIENTS,)
    first = row(weight_bytes=4096, gradient_bytes=3072, slot_bytes=2048, on_host=on_host)
    last = row(weight_bytes=1024, gradient_bytes=1024, on_host=on_host)
    text = render(plan_of(first, last), width=120)
    assert [line[5] for line in cells(text)[::2]] == ["4.0 KiB" if slots else "6.0 KiB", "1.0 KiB"]
    assert [line for line in below(text) if line.startswith(said)]
    assert "on the host" not in render(plan_of(row(gradient_bytes=3072)), width=120)
