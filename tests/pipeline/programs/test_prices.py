"""What tasks take that are done once a step, in numbers that can be found by hand."""

from __future__ import annotations

import dataclasses

import pytest

from smp_tf.pipeline.programs.kinds import KINDS, priced
from smp_tf.pipeline.programs.prices import Prices, Speeds
from smp_tf.pipeline.programs.text import parse, parse_program

#: Two stages and four replicas. The second stage's ranks are half as fast, and its ring a tenth.
PRICES = Prices(
    (Speeds(memory=8e9, ring=4e9), Speeds(memory=4e9, ring=4e8)),
    op_seconds=4e-6,
    replicas=4,
    trained=(8e6, 2e6),
    buckets={(0, 0): 6e6, (0, 1): 2e6, (1, 0): 2e6},
    slots=2.0,
    batch=8e8,
)


@pytest.mark.parametrize(
    ("task", "seconds"),
    [
        # Three ranks pass it on, twice.
        ("0WEIGH", 6 * 4e-6),
        # 2 x 3/4 of it.
        ("0REDUCE0", 1.5 * 6e6 / 4e9),
        ("1REDUCE0", 1.5 * 2e6 / 4e8),
        # Gradient, weight twice, two slots twice: 7 x 2 MB.
        ("0APPLY1", 14e6 / 8e9),
        ("1APPLY", 14e6 / 4e9),
        # The other stage's message, and one back.
        ("0SUM", 2 * 4e-6),
        ("1SUM", 4e-6),
        ("1TELL", 4e-6),
        # All of the batch, on one of a hundred steps.
        ("0CHECK", 0.1 / 100),
    ],
)
def test_a_task_is_priced_by_what_it_moves(task: str, seconds: float) -> None:
    of = parse(task)
    price = KINDS[of.kind].price
    assert price is not None
    assert price(PRICES, of) == pytest.approx(seconds)


def test_sums_over_replicas_wait_until_the_library_that_adds_up_looks_for_work() -> None:
    waiting = dataclasses.replace(PRICES, stages=[dataclasses.replace(each, wait=5e-4) for each in PRICES.stages])
    program = parse_program("0F0 0WEIGH 0REDUCE0 0APPLY1\n1F0 1REDUCE0")
    longer = {task: seconds - priced(program, PRICES)[task] for task, seconds in priced(program, waiting).items()}
    assert {str(task): pytest.approx(seconds) for task, seconds in longer.items()} == {
        "0WEIGH": 5e-4, "0REDUCE0": 5e-4, "1REDUCE0": 5e-4, "0APPLY1": 0.0,
    }  # fmt: skip


def test_shared_slots_are_updated_in_parts_and_weights_go_around() -> None:
    shared = Prices(PRICES.stages, 4e-6, replicas=4, trained=(8e6, 2e6), slots=2.0, slot_shares=4)
    assert priced(parse_program("0F0 0APPLY\n1F0"), shared) == {
        parse("0APPLY"): pytest.approx(56e6 / 4 / 8e9 + 0.75 * 8e6 / 4e9)
    }


def test_what_is_done_for_every_microbatch_has_no_price() -> None:
    assert priced(parse_program("0F0 0B0 0REDUCE1\n1F0 1B0"), PRICES).keys() == {parse("0REDUCE1")}
