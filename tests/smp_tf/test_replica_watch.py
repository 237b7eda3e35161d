"""Replicas in steps of different functions are named; one that may only be late is told of, once."""

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
        "activity": "",
        "waits": [],
        **more,
    }


def outside(rank: int, seconds: float = 31.0, **more: Any) -> dict[str, Any]:
    return {**in_step(rank, GENERATOR, 6, seconds), "in_step": False, **more}


def waiting(status: dict[str, Any]) -> dict[str, Any]:
    """The same rank, which waits for a message of its step."""
    wait = {"peer": 2, "is_send": False, "label": "relu", "program": status["program"], "step": 7, "seconds": 9.0}
    return {**status, "waits": [wait]}


class World:
    """A transport of rank 0 that answers for all ranks."""

    def __init__(self, *statuses: dict[str, Any] | None) -> None:
        self.rank = 0
        self.statuses = list(statuses)

    def ask(self, rank: int, timeout: float = 1.0) -> Any:
        return copy.deepcopy(self.statuses[rank])


def watch(world: World) -> ReplicaWatch:
    others = range(1, len(world.statuses))
    return ReplicaWatch(world, list(others), "rank {}".format, NAMES.__getitem__)  # type: ignore[arg-type]


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
        (in_step(1, EVALUATION), "rank 1 has been in step 7 of a program that this rank does not know for 31 s"),
        (
            waiting(in_step(1, DISCRIMINATOR)),
            "rank 1 has been in step 7 of 'discriminator' for 31 s and waits for 'relu' from rank 2",
        ),
    ],
    ids=["outside", "in an exchange", "not begun", "in an evaluation", "waits for a message"],
)
def test_who_is_late_is_told_of_once_and_nothing_ends(
    other: dict[str, Any], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    looking = watch(World(in_step(0, GENERATOR), other))
    for _ in range(3):
        looking.look()
    assert capfd.readouterr().err.splitlines() == [
        "smp_tf: Rank 0 has been in step 7 of 'generator' for 31 s and waits for no message: it computes, or its "
        f"gradients wait for those of other replicas; {words}. The job goes on."
    ]


@pytest.mark.parametrize(
    "statuses",
    [
        [in_step(0, GENERATOR, seconds=29.0), in_step(1, DISCRIMINATOR)],
        [in_step(0, GENERATOR), in_step(1, GENERATOR)],
        [in_step(0, RAGGED), in_step(1, GENERATOR)],
        [waiting(in_step(0, GENERATOR)), in_step(1, DISCRIMINATOR)],
        [in_step(0, EVALUATION), in_step(1, DISCRIMINATOR)],
        [in_step(0, GENERATOR), None],
        [in_step(0, GENERATOR), outside(1, seconds=29.0)],
        [in_step(0, GENERATOR), in_step(1, DISCRIMINATOR, seconds=1.0)],
        [outside(0), in_step(1, DISCRIMINATOR)],
    ],
    ids=[
        "briefly", "one step", "one function", "waits for a message", "no gradients", "silent", "just outside",
        "just there", "outside itself",
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
