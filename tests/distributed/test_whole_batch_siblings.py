"""Scripts as strangers write them train as with plain Keras, however they are cut and in whatever order they run.

They are in tests/distributed/siblings, by kinds. Every script runs in several ways, so that each kind meets all numbers
of microbatches and of stages, and all schedules. Batches are of 21 samples, and the last one of 2.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.conftest import LaunchedCase
from tests.distributed.harness import Case, CaseResult
from tests.distributed.siblings.table import SIBLINGS
from tests.full_only import params

CASES = "tests.distributed.cases.whole_batch_siblings"
MICROBATCHES = (4, 3, 8, 2, 1)
#: Those that need one chunk of the model on each rank, and so run with as many stages as the scripts have layers.
SCHEDULES = ("interleaved", "simple", "zb_h1")
#: Those that need two chunks on each rank.
IN_CHUNKS = ("interleaved_1f1b", "zb_v", "v_half", "v_min")
#: What runs by default.
BY_DEFAULT = (
    *("masks focal_over_positives P2 M8 interleaved", "gradients signs_of_momentum P2 M1 v_half"),
    "states written_thrice P2 M4 zb_h1",
)
#: The scripts that run on two replicas, too, of one stage or two each. A batch of 20 is divided among the replicas.
OF_REPLICAS = (
    *(("sums", "subclassed"), ("masks", "focal_over_positives"), ("trackers", "dice"), ("gradients", "centralised")),
    *(
        ("gradients", "of_two_tasks"),
        ("optimizers", "normalised"),
        ("masks", "half_labelled"),
        ("mixtures", "redundancy"),
    ),
    *(("states", "written_then_read"), ("states", "written_thrice")),
)


def launched(kind: str, name: str, stages: int, microbatches: int, pipeline: str, replicas: int = 1) -> LaunchedCase:
    config = {"partitions": stages, "microbatches": microbatches, "pipeline": pipeline, "seed": 1}
    title = f"{kind} {name} P{stages} M{microbatches} {pipeline}" + (f" D{replicas}" if replicas > 1 else "")
    case = Case(title, "compare", {"kind": kind, "name": name}, config)
    # A launch of one kind takes minutes, one of all kinds too long.
    group = 0 if title in BY_DEFAULT else 1 + list(SIBLINGS).index(kind)
    return LaunchedCase(stages * replicas, CASES, case, group=group)


def ways() -> Iterator[LaunchedCase]:
    """Each script on one stage, twice on two and on three; numbers and schedules take turns."""
    turn = 0
    for kind, scripts in SIBLINGS.items():
        for name in scripts:
            yield launched(kind, name, 2, MICROBATCHES[turn % 5], SCHEDULES[turn % 3])
            yield launched(kind, name, 2, MICROBATCHES[(turn + 1) % 5], IN_CHUNKS[turn % 4])
            yield launched(kind, name, 3, MICROBATCHES[(turn + 2) % 5], SCHEDULES[(turn + 1) % 3])
            yield launched(kind, name, 1, MICROBATCHES[(turn + 3) % 5], SCHEDULES[(turn + 2) % 3])
            turn += 1
    for turn, (kind, name) in enumerate(OF_REPLICAS):
        yield launched(kind, name, 1 + turn % 2, MICROBATCHES[turn % 4], SCHEDULES[turn % 3], replicas=2)


ALL = list(ways())
OTHERS = [way for way in ALL if way.case.name not in BY_DEFAULT]


@pytest.mark.distributed
@pytest.mark.parametrize("launched", params(ALL, OTHERS), ids=lambda way: way.case.name)
def test_it_trains_as_plain_keras(case_result: CaseResult) -> None:
    for off, where in case_result.values():
        assert off < 1e-9, f"{where} is off by {off}"
