"""Replicas in steps of different functions are named; one that may only be late is told of, once, and has its time."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from smp_tf import replica_watch
from smp_tf.errors import RankMismatchError
from smp_tf.replica_watch import ReplicaWatch

GENERATOR, DISCRIMINATOR, RAGGED, EVALUATION = 1, 2, 3, 4
NAMES = {GENERATOR: "'generator'", DISCRIMINATOR: "'discriminator'", RAGGED: "'generator' on x", EVALUATION: "'eval'"}


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_watch, "_averaging", {})
    monkeypatch.setattr(replica_watch, "_everywhere", set())
    replica_watch.know_program(GENERATOR, "generator/0", everywhere=True)
    replica_watch.know_program(DISCRIMINATOR, "discriminator/0", everywhere=True)
    replica_watch.know_program(RAGGED, "generator/0", everywhere=False)


def in_step(rank: int, program: int, step: int = 7, seconds: float = 31.0, **more: Any) -> dict[str, Any]:
    return {
        "rank": rank,
        "in_step": True,
        "program": program,
        "step": step,
        "step_seconds": seconds,
        "averages": 8,
        "activity": "",
        "waits": [],
        **more,
    }


def outside(rank: int, seconds: float = 31.0, **more: Any) -> dict[str, Any]:
    """One step with gradients behind the others."""
    return {**in_step(rank, GENERATOR, 6, seconds), "in_step": False, "averages": 7, **more}


def waiting(status: dict[str, Any]) -> dict[str, Any]:
    """The same rank, which waits for a message of its step."""
    wait = {"peer": 2, "is_send": False, "label": "relu", "program": status["program"], "step": 7, "seconds": 9.0}
    return {**status, "waits": [wait]}


class World:
    """A transport of rank 0 that answers for all ranks."""

    def __init__(self, *statuses: dict[str, Any] | None) -> None:
        self.rank = 0
        self.statuses = list(statuses)
        self.gone: set[int] = set()
        self.now = 0.0

    def ask(self, rank: int, timeout: float = 1.0) -> Any:
        return copy.deepcopy(self.statuses[rank])

    def await_goodbyes(self, ranks: list[int], timeout: float) -> bool:
        return set(ranks) <= self.gone


def watch(world: World, stall_timeout: float = 1800.0) -> ReplicaWatch:
    others = list(range(1, len(world.statuses)))
    return ReplicaWatch(
        world,  # type: ignore[arg-type]
        others,
        "rank {}".format,
        NAMES.__getitem__,
        stall_timeout,
        clock=lambda: world.now,
    )


def test_replicas_in_steps_of_different_functions_are_named() -> None:
    """They once waited in Horovod until stall_timeout."""
    looking = watch(World(in_step(0, GENERATOR), in_step(1, DISCRIMINATOR, 5, 40.0)))
    looking.look()
    with pytest.raises(RankMismatchError) as error:
        looking.look()
    assert str(error.value) == (
        "Rank 0 has been in step 7 of 'generator' for 31 s and waits for no message: it computes, or its gradients "
        "wait for those of other replicas, while rank 1 has been in step 5 of 'discriminator' for 40 s. Each averages "
        "gradients with the other, of different steps, so neither can end: all replicas must call the steps that give "
        "gradients in the same order. Every rank must call the same steps in the same order, and the ranks of a "
        "replica with batches of the same shapes."
    )


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (outside(1), "rank 1 ended its step 6 31 s ago"),
        (outside(1, activity="at smp.barrier"), "rank 1 ended its step 6 31 s ago, doing 'at smp.barrier'"),
        (outside(1, step=-1), "rank 1 has begun no step yet, 31 s after its start"),
        (outside(1, seconds=1.0), "rank 1 ended its step 6 1 s ago"),
        (
            in_step(1, EVALUATION, seconds=1.0, averages=7),
            "rank 1 has been in step 7 of a program that this rank does not know for 1 s",
        ),
        (
            waiting(in_step(1, DISCRIMINATOR, averages=7)),
            "rank 1 has been in step 7 of 'discriminator' for 31 s and waits for 'relu' from rank 2",
        ),
    ],
    ids=["outside", "in an exchange", "not begun", "just outside", "in an evaluation", "waits for a message"],
)
def test_who_is_late_is_told_of_once_and_the_job_goes_on(
    other: dict[str, Any], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    looking = watch(World(in_step(0, GENERATOR), other))
    for _ in range(3):
        looking.look()
    assert capfd.readouterr().err.splitlines() == [
        "smp_tf: Rank 0 has been in step 7 of 'generator' for 31 s and waits for no message: it computes, or its "
        f"gradients wait for those of other replicas; {words}. The job goes on; it ends after "
        "stall_timeout = 1800 s."
    ]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (outside(1, seconds=41.0), "rank 1 ended its step 6 41 s ago"),
        (outside(1, seconds=41.0, step=-1), "rank 1 has begun no step yet, 41 s after its start"),
        (
            waiting(in_step(1, DISCRIMINATOR, seconds=41.0, averages=7)),
            "rank 1 has been in step 7 of 'discriminator' for 41 s and waits for 'relu' from rank 2",
        ),
    ],
    ids=["outside", "not begun", "in another step"],
)
def test_a_replica_that_is_late_for_stall_timeout_ends_all(other: dict[str, Any], words: str) -> None:
    """It was once told of, and waited for without end."""
    with pytest.raises(RankMismatchError) as error:
        watch(World(in_step(0, GENERATOR, seconds=42.0), other), stall_timeout=40.0).look()
    assert str(error.value) == (
        "Rank 0 gave up in step 7 of 'generator' after stall_timeout = 40 s: its gradients wait for those of other "
        f"replicas, and {words}. All replicas must come to every step that gives gradients; a rank that only needs "
        "longer gets it with a larger stall_timeout."
    )


def test_a_replica_that_does_not_answer_is_told_of_and_ends_all_after_stall_timeout(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It was once left out without a word."""
    world = World(in_step(0, GENERATOR), None)
    looking = watch(world, stall_timeout=40.0)
    looking.look()
    assert capfd.readouterr().err == "", "it may have been kept from answering once"
    for world.now in (6.0, 39.0):
        world.statuses[0] = in_step(0, GENERATOR, seconds=31.0 + world.now)
        looking.look()
    silent = "rank 1 does not answer: its process is stopped, out of reach, or has no processor time"
    assert capfd.readouterr().err.splitlines() == [
        "smp_tf: Rank 0 has been in step 7 of 'generator' for 37 s and waits for no message: it computes, or its "
        f"gradients wait for those of other replicas; {silent}. The job goes on; it ends after stall_timeout = 40 s."
    ]
    world.now = 41.0
    with pytest.raises(RankMismatchError, match=f"after stall_timeout = 40 s: .*, and {silent}"):
        looking.look()


def test_a_replica_that_answers_again_has_all_its_time_again() -> None:
    world = World(in_step(0, GENERATOR, seconds=100.0), None)
    looking = watch(world, stall_timeout=40.0)
    for world.now, answer in ((0.0, None), (39.0, in_step(1, GENERATOR)), (42.0, None), (81.0, None)):
        world.statuses[1] = answer
        looking.look()


def test_evaluations_in_place_of_a_step_do_not_count_as_coming_to_it() -> None:
    other = in_step(1, EVALUATION, seconds=1.0, averages=7)
    with pytest.raises(RankMismatchError, match="has been in step 7 of a program that this rank does not know for 1 s"):
        watch(World(in_step(0, GENERATOR, seconds=42.0), other), stall_timeout=40.0).look()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            in_step(1, GENERATOR, seconds=1801.0),
            "rank 1 has been in step 7 of 'generator' for 1801 s: it computes, or hangs there",
        ),
        (
            in_step(1, EVALUATION, seconds=1801.0),
            "rank 1 has been in step 7 of a program that this rank does not know for 1801 s: it computes, or hangs "
            "there",
        ),
    ],
    ids=["by its number", "with another batch"],
)
def test_who_is_in_the_same_step_for_long_is_told_of_once_and_nothing_ends(
    other: dict[str, Any], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    looking = watch(World(in_step(0, GENERATOR, seconds=1802.0), other))
    for _ in range(3):
        looking.look()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith(f"gradients wait for those of other replicas; {words}. The job goes on.")


def test_a_replica_that_has_left_is_left_to_the_transport(capfd: pytest.CaptureFixture[str]) -> None:
    world = World(in_step(0, GENERATOR, seconds=3000.0), None)
    world.gone = {1}
    looking = watch(world)
    for world.now in (0.0, 10.0, 3000.0):
        looking.look()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "statuses",
    [
        [in_step(0, GENERATOR, seconds=29.0), in_step(1, DISCRIMINATOR)],
        [in_step(0, GENERATOR), in_step(1, GENERATOR)],
        [in_step(0, RAGGED), in_step(1, GENERATOR)],
        [waiting(in_step(0, GENERATOR)), in_step(1, DISCRIMINATOR)],
        [in_step(0, EVALUATION), in_step(1, DISCRIMINATOR)],
        [in_step(0, GENERATOR), None],
        [in_step(0, GENERATOR), outside(1, averages=8)],
        [in_step(0, GENERATOR), waiting(in_step(1, DISCRIMINATOR))],
        [in_step(0, GENERATOR), in_step(1, DISCRIMINATOR, seconds=1.0)],
        [outside(0), in_step(1, DISCRIMINATOR)],
    ],
    ids=[
        "briefly", "one step", "one function", "waits for a message", "no gradients", "silent", "ahead",
        "waits for a message there", "just there", "outside itself",
    ],
)  # fmt: skip
def test_anything_else_is_left_alone(statuses: list[Any], capfd: pytest.CaptureFixture[str]) -> None:
    looking = watch(World(*statuses))
    for _ in range(3):
        looking.look()
    assert capfd.readouterr().err == ""


def test_replicas_that_move_on_are_left_alone() -> None:
    world = World(in_step(0, GENERATOR), in_step(1, DISCRIMINATOR))
    looking = watch(world)
    for number in range(4):
        world.statuses[1] = in_step(1, DISCRIMINATOR, number)
        looking.look()
