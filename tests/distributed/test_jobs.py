"""Jobs in the same processes, with other configurations than the ones before: as if each had processes of its own."""

from __future__ import annotations

import pytest

from tests import jobs
from tests.distributed.conftest import LaunchedCase
from tests.distributed.harness import Case, CaseResult, launch

CASES = "tests.distributed.cases.jobs"
KINDS = [
    jobs.job("Adam", saves=True, partitions=2, microbatches=4),
    jobs.job("Adam", saves=True, partitions=1, microbatches=2, shard_optimizer_state=True),
    jobs.job("SGD", partitions=2, microbatches=2, pipeline="simple", check_inputs=False, fits=True),
    jobs.job("Nadam", fits=True, partitions=1, microbatches=4, gradient_compression="fp16", recompute=True),
    jobs.job("Adam", partitions=2, microbatches=4, pipeline="interleaved_1f1b", optimizer_offload=True),
]


def of(order: list[int]) -> LaunchedCase:
    return LaunchedCase(2, CASES, Case(f"{len(order)} jobs", "run", {"kinds": [KINDS[kind] for kind in order]}, None))


FEW, MANY = [0, 1, 0], [0, 1, 2, 3, 4] * 4


@pytest.mark.parametrize(
    ("order", "launched"), [(FEW, of(FEW)), pytest.param(MANY, of(MANY), marks=pytest.mark.full)], ids=["3", "20"]
)
def test_each_job_is_like_the_first_of_its_kind(order: list[int], case_result: CaseResult) -> None:
    for found in case_result.values():
        assert jobs.left(found) == {}
        assert found["threads"] == []
        assert jobs.unlike_the_first(found, order) == []
        assert len(set(found["bits"])) == len(set(order))


@pytest.mark.full
def test_jobs_in_one_process_give_the_bits_of_processes_of_their_own() -> None:
    together = launch(2, CASES, [of(MANY).case], fresh=True)["20 jobs"].values()
    for kind, arguments in enumerate(KINDS):
        apart = launch(2, CASES, [Case("one", "train", {"kind": arguments}, None)], fresh=True)["one"].values()
        assert [rank["bits"] for rank in apart] == [rank["bits"][kind] for rank in together], arguments
