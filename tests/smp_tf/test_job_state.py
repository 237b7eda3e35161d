"""What belongs to a job is made by it and dies with it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

import smp_tf as smp
from smp_tf import job_state
from smp_tf.job_state import JobState
from tests import jobs, module_state

_LIBRARY = "a library is loaded once"
_HOOK = "what Python is to do when it forks cannot be taken back"
_IN_FUNCTIONS = "a function of the script's that was traced with it may live longer than the job"
_FEW = "there are few types"
#: Functions that remember whatever they have returned, and why.
REMEMBERING = {
    "smp_tf.ops.library.tf_ops_library": _LIBRARY,
    "smp_tf.ops.library.transport_library": _LIBRARY,
    "smp_tf.ops.recorder._functions": _LIBRARY,
    "smp_tf.ops.send_recv._order": _IN_FUNCTIONS,
    "smp_tf.ops.start_guard._functions": _LIBRARY,
    "smp_tf.ops.transport._hook_forks": _HOOK,
    "smp_tf.optimizer.apply._stand_in": _IN_FUNCTIONS,
    "smp_tf.partition.graph.op_graph.item_bytes": _FEW,
    "smp_tf.partition.plan.json_record._hints": _FEW,
    "smp_tf.pipeline.measure.profile._ballast": "it fills the processor's cache, which stays the same",
    "smp_tf.pipeline.run.accumulator._truth": _FEW,
    "smp_tf.pipeline.run.accumulator._type": _FEW,
    "smp_tf.collectives.interface.order": _IN_FUNCTIONS,
    "smp_tf.collectives.forked_children.hook_forks": _HOOK,
    "smp_tf.start.import_watch._keep_from_children": _HOOK,
}

#: Jobs that differ in what they do; each runs more than once.
CONFIGURATIONS = [
    jobs.job("Adam", saves=True, microbatches=4),
    jobs.job("SGD", microbatches=2, pipeline="simple"),
    jobs.job("Adam", fits=True, microbatches=8, recompute=True),
    jobs.job("Nadam", saves=True, microbatches=4, optimizer_offload=True),
]


class TestOnePieceOfState:
    @pytest.fixture(autouse=True)
    def _own_values(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(job_state, "_values", {})

    def test_it_is_made_when_it_is_first_asked_for_and_again_in_the_next_job(self) -> None:
        numbers = itertools.count()
        state = JobState(lambda: [next(numbers)])
        assert state() == [0]
        assert state() is state()
        job_state.drop_all()
        assert state() == [1]

    def test_what_is_put_in_its_place_is_dropped_too(self) -> None:
        state = JobState(lambda: 0)
        state.put(3)
        assert state() == 3
        job_state.drop_all()
        assert state() == 0

    def test_one_may_be_made_of_another(self) -> None:
        first: JobState[list[int]] = JobState(list)
        second = JobState(lambda: (first(),))
        assert second()[0] is first()

    def test_what_fails_to_be_made_is_made_at_the_next_call(self) -> None:
        outcomes: Iterator[Any] = iter([ValueError("no job"), "made"])

        def make() -> str:
            outcome = next(outcomes)
            if isinstance(outcome, Exception):
                raise outcome
            return str(outcome)

        state = JobState(make)
        with pytest.raises(ValueError, match="no job"):
            state()
        assert state() == "made"


@pytest.mark.parametrize(
    "order", [[0, 1, 0], pytest.param([0, 1, 2, 3] * 5, marks=pytest.mark.full)], ids=["3 jobs", "20 jobs"]
)
def test_after_jobs_nothing_of_them_is_left(order: list[int], keras_defaults: None) -> None:
    found = jobs.run([CONFIGURATIONS[number] for number in order])
    assert jobs.left(found) == {}
    assert found["threads"] == []
    assert jobs.unlike_the_first(found, order) == []
    assert len(set(found["bits"])) == len(set(order))


def test_what_is_kept_is_there() -> None:
    """An entry of the list that nobody needs any more is one that hides something."""
    module_state.import_all()
    assert [path for path in jobs.KEPT if path not in module_state.snapshot()] == []


def test_functions_that_remember_results_forget_some_or_have_a_reason() -> None:
    module_state.import_all()
    assert sorted(path for path, most in module_state.caches().items() if most is None) == sorted(REMEMBERING)


def test_a_job_that_leaves_something_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    module_state.import_all()
    before = module_state.snapshot()
    smp.init()
    smp.shutdown()
    monkeypatch.setattr("smp_tf.job.runtime.left_over", [1], raising=False)
    found = module_state.differences(before, module_state.snapshot())
    assert {path: words for path, words in found.items() if path not in jobs.KEPT} == {
        "smp_tf.job.runtime.left_over": "nothing -> ('list', [1])"
    }
