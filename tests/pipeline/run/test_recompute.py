"""Models whose backward makes again what their forward made give what they give uncut, to the last bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.pipeline.all_stages import CutStep
from tests.pipeline.run.test_all_models import (
    SMALL,
    cond_and_while,
    gru,
    lstm,
    masked_recurrence,
    mobilenet_v2,
    resnet50,
    run,
    tied_gpt,
    u_net,
)

pytestmark = pytest.mark.large

#: One of them by default, in turns.
SETTINGS = ((2, 4, "simple"), (1, 2, "interleaved"), (2, 4, "zb_h1"), (3, 4, "interleaved"), (2, 2, "zb_v"))
LARGE = (masked_recurrence, lstm, gru, cond_and_while, resnet50, mobilenet_v2)


def with_settings() -> Iterator[object]:
    """Every model with every setting; which of them run by default."""
    for (number, make), (index, setting) in itertools.product(enumerate((*SMALL, *LARGE)), enumerate(SETTINGS)):
        by_default = number % len(SETTINGS) == index and make not in LARGE[1:]
        name = "-".join(map(str, (make.__name__, *setting)))
        yield pytest.param(make, *setting, id=name, marks=[] if by_default else [pytest.mark.full])


@pytest.mark.parametrize(("make", "stages", "microbatches", "schedule"), list(with_settings()))
def test_same_bits_as_uncut(make: Any, stages: int, microbatches: int, schedule: str) -> None:
    run(make, stages, microbatches, schedule, recompute=True)


def stash_bytes(step: CutStep, stage: int) -> int:
    """Of one microbatch."""
    return sum(step.graph.type_of(tensor).nbytes() for tensor in step.split.stash(stage))


@pytest.mark.parametrize(("make", "share"), [(u_net, 0.6), (tied_gpt, 0.5)])
def test_less_is_kept(make: Any, share: float) -> None:
    kept, again = run(make, 2, 4, "simple"), run(make, 2, 4, "simple", recompute=True)
    bytes_kept, bytes_again = ([stash_bytes(step, stage) for stage in range(2)] for step in (kept, again))
    assert sum(bytes_again) < share * sum(bytes_kept), (bytes_kept, bytes_again)
