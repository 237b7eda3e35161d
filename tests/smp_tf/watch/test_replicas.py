"""Replicas in steps of different functions are named; one that may only be late is told of, once, and has its time."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from smp_tf.errors import RankMismatchError
from smp_tf.job_state import JobState
from smp_tf.watch import replicas
from smp_tf.watch.replicas import ReplicaWatch

GENERATOR, DISCRIMINATOR, RAGGED, EVALUATION = 1, 2, 3, 4
NAMES = {GENERATOR: "'generator'", DISCRIMINATOR: "'discriminator'", RAGGED: "'generator' on x", EVALUATION: "'eval'"}


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_averaging", JobState(dict))
    monkeypatch.setattr(replicas, "_everywhere", JobState(set))
    replicas.know_program(GENERATOR, "generator/0", everywhere=True)
    replicas.know_program(DISCRIMINATOR, "discriminator/0", everywhere=True)
    replicas.know_program(RAGGED, "generator/0", everywhere=False)


def in_step(rank: int, program: int, step: int = 7, seconds: float = 31.0, **more: Any) -> dict[str, Any]:
    """A rank that has come to the average of a step's gradients, if that gives some."""
    name = f"gradients of {NAMES[program]}" if program != EVALUATION else ""
    return {
        "rank": rank,
        "in_step": True,
        "program": program,
        "step": step,
        "step_seconds": seconds,
        "activity": "",
        "collectives": [name] if name else [],
        "more_collectives": False,
        "collective": name,
        "collective_seconds": seconds if name else 0.0,
        "waits": [],
        **more,
    }


def computing(status: dict[str, Any]) -> dict[str, Any]:
    """The same rank, which waits for no other replica."""
    return {**status, "collectives": [], "collective": "", "collective_seconds": 0.0}


def outside(rank: int, seconds: float = 31.0, **more: Any) -> dict[str, Any]:
    """One step with gradients behind the others."""
    return {**computing(in_step(rank, GENERATOR, 6, seconds)), "in_step": False, **more}


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
        "Rank 0 has waited 31 s for the other replicas at 'gradients of 'generator'' in step 7 of 'generator', while "
        "rank 1 has been in step 5 of 'discriminator' for 40 s and waits at 'gradients of 'discriminator''. Each "
        "averages gradients with the other, of different steps, so neither can end: all replicas must call the steps "
        "that give gradients in the same order. Every rank must call the same steps in the same order, and the ranks "
        "of a replica with batches of the same shapes."
    )


LATE = [
    (outside(1, seconds=41.0), "rank 1 ended its step 6 41 s ago"),
    (
        outside(1, seconds=41.0, activity="at smp.barrier"),
        "rank 1 ended its step 6 41 s ago, doing 'at smp.barrier'",
    ),
    (outside(1, seconds=41.0, step=-1), "rank 1 has begun no step yet, 41 s after its start"),
    (outside(1, seconds=1.0), "rank 1 ended its step 6 1 s ago"),
    (
        outside(1, seconds=41.0, collectives=["norm"], collective="norm"),
        "rank 1 ended its step 6 41 s ago and waits at 'norm'",
    ),
    (
        in_step(1, EVALUATION, seconds=1.0),
        "rank 1 has been in step 7 of a program that this rank does not know for 1 s and computes, or hangs there",
    ),
    (
        waiting(computing(in_step(1, DISCRIMINATOR, seconds=41.0))),
        "rank 1 has been in step 7 of 'discriminator' for 41 s and waits for 'relu' from rank 2",
    ),
    (
        computing(in_step(1, GENERATOR, seconds=41.0)),
        "rank 1 has been in step 7 of 'generator' for 41 s and computes, or hangs there",
    ),
]
LATE_NAMES = [
    "outside", "in an exchange", "not begun", "just outside", "at another collective", "in an evaluation",
    "waits for a message", "in the same step",
]  # fmt: skip


@pytest.mark.parametrize(("other", "words"), LATE, ids=LATE_NAMES)
def test_who_is_late_is_told_of_once_and_the_job_goes_on(
    other: dict[str, Any], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    looking = watch(World(in_step(0, GENERATOR), other))
    for _ in range(3):
        looking.look()
    assert capfd.readouterr().err.splitlines() == [
        "smp_tf: Rank 0 has waited 31 s for the other replicas at 'gradients of 'generator'' in step 7 of "
        f"'generator'; {words}. The job goes on; it ends after stall_timeout = 1800 s."
    ]


@pytest.mark.parametrize(("other", "words"), LATE, ids=LATE_NAMES)
def test_a_replica_that_is_late_for_stall_timeout_ends_all(other: dict[str, Any], words: str) -> None:
    """It was once told of, and waited for without end; for long so was one that hangs in the same step."""
    with pytest.raises(RankMismatchError) as error:
        watch(World(in_step(0, GENERATOR, seconds=42.0), other), stall_timeout=40.0).look()
    assert str(error.value) == (
        "Rank 0 gave up in step 7 of 'generator' after stall_timeout = 40 s: it waited for the other replicas at "
        f"'gradients of 'generator'', and {words}. All replicas must come to every step that gives gradients, and "
        "through it; a rank that only needs longer gets it with a larger stall_timeout."
    )


def test_outside_a_step_replicas_wait_for_each_other_as_long() -> None:
    """There they once were not looked after."""
    own = {**outside(0), "collectives": ["norm"], "collective": "norm", "collective_seconds": 41.0}
    with pytest.raises(RankMismatchError, match=r"gave up after step 6 of 'generator' .* at 'norm', and rank 1 ended"):
        watch(World(own, outside(1)), stall_timeout=40.0).look()
    own["step"] = -1
    with pytest.raises(RankMismatchError, match="gave up before its first step after stall_timeout"):
        watch(World(own, outside(1)), stall_timeout=40.0).look()


def test_a_collective_that_never_ends_though_all_are_there_ends_all(capfd: pytest.CaptureFixture[str]) -> None:
    own, other = in_step(0, GENERATOR, seconds=500.0), in_step(1, GENERATOR, seconds=500.0)
    world = World(own, computing(other))
    looking = watch(world, stall_timeout=1000.0)
    looking.look()
    assert "computes, or hangs there" in capfd.readouterr().err
    world.statuses[1] = other
    for world.now in (10.0, 1009.0):
        looking.look()
    world.now = 1011.0
    with pytest.raises(RankMismatchError, match="and all of them have come to it: Horovod is stuck, or the network"):
        looking.look()


def test_time_in_which_all_are_there_counts_anew_for_every_step() -> None:
    world = World(in_step(0, GENERATOR), in_step(1, GENERATOR))
    looking = watch(world, stall_timeout=40.0)
    for number in range(9):
        world.now = 30.0 * number
        world.statuses = [in_step(rank, GENERATOR, number) for rank in range(2)]
        looking.look()


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
        "smp_tf: Rank 0 has waited 37 s for the other replicas at 'gradients of 'generator'' in step 7 of 'generator'; "
        f"{silent}. The job goes on; it ends after stall_timeout = 40 s."
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
        [in_step(0, RAGGED, collectives=["of both"]), in_step(1, GENERATOR, collectives=["other", "of both"])],
        [computing(in_step(0, GENERATOR, seconds=9999.0)), outside(1)],
        [in_step(0, EVALUATION), in_step(1, DISCRIMINATOR)],
        [in_step(0, GENERATOR), None],
        [in_step(0, GENERATOR), in_step(1, GENERATOR, collectives=["another"], more_collectives=True)],
        [outside(0), in_step(1, DISCRIMINATOR)],
    ],
    ids=["briefly", "one step", "one average", "computes", "no gradients", "silent", "many averages", "outside itself"],
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


def test_what_the_script_waits_in_is_watched_over_those_who_take_part(capfd: pytest.CaptureFixture[str]) -> None:
    """Horovod's calls of the script were once watched by nobody; over all processes also where there is one replica."""
    own = {**outside(0), "collectives": ["hvd.allreduce"], "collective": "hvd.allreduce", "collective_seconds": 31.0}
    world = World(own, waiting(in_step(1, EVALUATION, seconds=1.0)))

    def looking(stall_timeout: float) -> ReplicaWatch:
        return ReplicaWatch(
            world,  # type: ignore[arg-type]
            [],
            "rank {}".format,
            NAMES.__getitem__,
            stall_timeout,
            clock=lambda: world.now,
            members={"hvd.allreduce": [0, 1]}.get,
        )

    looking(1800.0).look()
    assert capfd.readouterr().err.splitlines() == [
        "smp_tf: Rank 0 has waited 31 s for other processes at 'hvd.allreduce' after step 6 of 'generator'; rank 1 has "
        "been in step 7 of a program that this rank does not know for 1 s and waits for 'relu' from rank 2. The job "
        "goes on; it ends after stall_timeout = 1800 s."
    ]
    with pytest.raises(RankMismatchError) as error:
        looking(30.0).look()
    assert str(error.value) == (
        "Rank 0 gave up after step 6 of 'generator' after stall_timeout = 30 s: it waited for other processes at "
        "'hvd.allreduce', and rank 1 has been in step 7 of a program that this rank does not know for 1 s and waits "
        "for 'relu' from rank 2. All processes of a process set must make each call of Horovod over it; a rank that "
        "only needs longer gets it with a larger stall_timeout."
    )


JOINED = {"collectives": ["hvd.join"], "collective": "hvd.join", "collective_seconds": 31.0}
AVERAGING = {"collectives": ["hvd.allreduce"], "collective": "hvd.allreduce", "collective_seconds": 31.0}


def test_who_joins_is_never_ended_for_it(capfd: pytest.CaptureFixture[str]) -> None:
    """Waiting for those who have more batches is what hvd.join is for; it ended the job as an allreduce does."""
    world = World({**outside(0), **JOINED}, outside(1, 1.0))
    looking = watch(world, stall_timeout=30.0)
    looking._members = {"hvd.join": [0, 1], "hvd.allreduce": [0, 1]}.get
    for _ in range(2):
        looking.look()
    world.statuses[1] = outside(1, 1.0, **JOINED)
    looking.look()
    world.now = 100.0
    looking.look()
    [line] = capfd.readouterr().err.splitlines()
    assert "waited 31 s for other processes at 'hvd.join'" in line
    assert line.endswith("The job goes on; hvd.join waits as long as others train.")


def test_who_has_joined_takes_part_in_what_others_call(capfd: pytest.CaptureFixture[str]) -> None:
    looking = watch(World({**outside(0), **AVERAGING}, {**outside(1), **JOINED}), stall_timeout=30.0)
    looking._members = {"hvd.join": [0, 1], "hvd.allreduce": [0, 1]}.get
    looking.look()
    assert capfd.readouterr().err == ""
