"""A plan that needs too much is told stage by stage, with what would help."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from smp_tf.partition.errors import MemoryLimitError, PlacementError
from smp_tf.partition.place.placement import Ranks
from smp_tf.partition.plan.memory_limit import enough, excess, too_large
from smp_tf.partition.plan.stage_forecast import Use
from tests.partition.plan.test_plan import small_plan
from tests.partition.uses_on_host import with_on_host

# Both stages of the small plan need 2624 bytes.


def test_the_excess_is_that_of_the_fullest_stage() -> None:
    assert excess(small_plan(), (2624, None)) == 0
    assert excess(small_plan(), (2500, 2000)) == 624
    first, last = small_plan().forecast
    assert excess(small_plan(forecast=(first, last.with_memory({Use.WORK: 100}))), (2624,) * 2) == 36


def test_the_error_says_what_each_stage_needs_and_what_would_help() -> None:
    first, last = small_plan().forecast
    plan = small_plan(forecast=(first, last.with_memory({Use.SLOTS: 0})))
    error = too_large(plan, Ranks.alike(2, 2048), ["3 partitions", "a memory_limit of 2.6 KiB"])
    assert isinstance(error, PlacementError)
    assert str(error).splitlines() == [
        "The model does not fit: memory_limit is 2.0 KiB (2,048 bytes) a rank, and with 2 partitions the ranks need",
        "  stage 0: 2.6 KiB, 576 B too much (weights 512 B, gradients 512 B, slots 1.0 KiB, stash 512 B, work 64 B) "
        "for embedding, block_0",
        "  stage 1: 1.6 KiB (weights 512 B, gradients 512 B, stash 512 B, work 64 B) for block_1, loss and outputs",
        "What would help: more partitions; smaller microbatches: a larger `microbatches`, or smaller batches; "
        "recompute true; a higher memory_limit.",
        "What would fit: 3 partitions; or a memory_limit of 2.6 KiB.",
    ]


def test_what_is_on_the_host_is_not_limited_but_told() -> None:
    rows = tuple(with_on_host(row, Use.GRADIENTS) for row in small_plan().forecast)
    plan = small_plan(forecast=rows)
    assert excess(plan, (2112, 2112)) == 0
    error = too_large(plan, Ranks.alike(2, 2000))
    assert (
        "  stage 0: 2.1 KiB, 112 B too much (weights 512 B, gradients 512 B, slots 1.0 KiB, stash 512 B, work 64 B; of "
        "these, 512 B on the host) for embedding, block_0" in str(error).splitlines()
    )
    assert error.needed == 2112


@pytest.mark.parametrize(
    ("row", "memory", "changes", "advice"),
    [
        ({"units": 1}, {Use.STASH: 0, Use.WORK: 0}, {}, "What would help: a higher memory_limit."),
        ({"units": 1}, {Use.STASH: 0}, {}, "What would help: smaller microbatches"),
        ({"in_flight": 8}, {}, {"schedule": "simple"}, 'pipeline "interleaved", which keeps the stash of fewer'),
    ],
)
def test_only_what_can_help_is_advised(
    row: dict[str, Any], memory: dict[Use, int], changes: dict[str, Any], advice: str
) -> None:
    first, _ = small_plan().forecast
    plan = small_plan(**changes, forecast=(dataclasses.replace(first, **row).with_memory(memory),) * 2)
    said = str(too_large(plan, Ranks.alike(2, 1)))
    assert advice in said
    assert ("more partitions" in said) == ("units" not in row)
    assert isinstance(too_large(plan, Ranks.alike(2, 1)), MemoryLimitError)


def test_what_hosts_have_is_told_as_theirs() -> None:
    alike = Ranks((1.0,) * 2, (1.0,) * 2, (2048.0,) * 2, (), (2048.0,) * 2, ("memory of host 0",) * 2)
    first, *_, advice = str(too_large(small_plan(), alike)).splitlines()
    assert first == (
        "The model does not fit: memory of host 0 is 2.0 KiB (2,048 bytes) a rank, and with 2 partitions the ranks need"
    )
    assert advice.endswith("recompute true; ranks with more memory.")
    assert enough(small_plan(), alike) == "ranks with 2.6 KiB"


def test_ranks_that_differ_are_told_with_what_limits_each() -> None:
    own, names = (4096.0, 1024.0), ("memory of host 0", "memory of host 1, rank 1")
    ranks = Ranks((1.0,) * 2, (1.0,) * 2, own, (), own, names)
    said = str(too_large(small_plan(), ranks)).splitlines()
    assert said[0] == "The model does not fit: ranks may need as listed, and with 2 partitions they need"
    assert said[1].startswith("  stage 0: 2.6 KiB of 4.0 KiB (memory of host 0) (weights")
    assert said[2].startswith("  stage 1: 2.6 KiB of 1.0 KiB (memory of host 1, rank 1), 1.6 KiB too much (weights")
    assert too_large(small_plan(), ranks).excess == 1600
    assert enough(small_plan(), ranks) == "ranks with 2.6 KiB for stage 1"
    # Of the two limits of a rank the smaller one is its limit.
    both = ranks.within(2048)
    assert [both.limit_in_words(stage) for stage in range(2)] == ["memory_limit", "memory of host 1, rank 1"]
    assert (
        str(too_large(small_plan(), both)).splitlines()[-1].endswith("a higher memory_limit; ranks with more memory.")
    )
    # A higher limit alone would not do, nor would larger ranks.
    assert enough(small_plan(), both) == "a memory_limit of 2.6 KiB and ranks with 2.6 KiB for stage 1"
    assert enough(small_plan(), ranks.within(4096)) == "ranks with 2.6 KiB for stage 1"


def test_what_a_file_says_and_what_horovod_takes_is_not_advised_away() -> None:
    rows = tuple(row.with_memory({Use.STASH: 0, Use.WORK: 0, Use.TRANSPORT: 1000}) for row in small_plan().forecast)
    said = str(too_large(small_plan(forecast=rows), Ranks.alike(2, 1), averaging=1000, is_given=True)).splitlines()[-1]
    assert said == (
        "What would help: a smaller HOROVOD_FUSION_THRESHOLD, or one replica: 1000 B are Horovod's, to average in; a "
        "higher memory_limit."
    )


def test_of_many_stages_only_some_are_told() -> None:
    plan = small_plan()
    many = dataclasses.replace(
        plan,
        stages=40,
        placement=tuple(range(40)),
        forecast=plan.forecast[:1] * 40,
    )
    lines = str(too_large(many, Ranks.alike(40, 2048))).splitlines()
    assert len(lines) == 1 + 16 + 1 + 1
    assert lines[17] == "  and 24 stages more, of which one needs 576 B too much"
