"""Ranks that wait for each other in different steps are named; ranks that are slow are left alone."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from smp_tf.errors import RankMismatchError
from smp_tf.ops.transport import MESSAGE_PROGRAM
from smp_tf.watch import steps
from smp_tf.watch.deadlock import IN_BACKGROUND
from smp_tf.watch.steps import StepWatch


def status(rank: int, program: int, waits_for: int | None, of: int | None = None, **of_wait: Any) -> dict[str, Any]:
    wait = {
        "peer": waits_for,
        "is_send": False,
        "label": f"tensor of {program}",
        "program": program if of is None else of,
        "step": 7,
        "microbatch": 0,
        "seconds": 6.0,
        **of_wait,
    }
    waits = [] if waits_for is None else [wait]
    return {
        "rank": rank,
        "in_step": True,
        "program": program,
        "step": 7,
        "waits": waits,
        "activity": "",
        "activity_seconds": 0.0,
    }


def message(rank: int, doing: str, waits_for: int, label: str = "an object", **of_wait: Any) -> dict[str, Any]:
    """A rank whose script waits for a message outside its steps."""
    found = status(rank, 1, waits_for, of=MESSAGE_PROGRAM, label=label, **of_wait)
    return {**found, "in_step": False, "activity": doing, "activity_seconds": 6.0}


class World:
    """A transport of rank 0 that answers for all ranks, and notes what it is told."""

    def __init__(self, *statuses: Mapping[str, Any] | None) -> None:
        self.rank = 0
        self.statuses = list(statuses)
        self.told: list[str] = []
        self.is_open = True

    def ask(self, rank: int, timeout: float = 1.0) -> Any:
        return copy.deepcopy(self.statuses[rank])

    def abort(self, message: str, **details: Any) -> bool:
        self.told.append(message)
        return True


def watch(world: World, **options: float) -> StepWatch:
    return StepWatch(world, "rank {}".format, **options)  # type: ignore[arg-type]


def test_two_ranks_in_two_steps_that_wait_for_each_other_are_named() -> None:
    steps.name_program(1, "'train' on x: float32(16, 8)")
    looking = watch(World(status(0, 1, 1), status(1, 2, 0, is_send=True)))
    looking.look()
    with pytest.raises(RankMismatchError) as error:
        looking.look()
    assert str(error.value) == (
        "The ranks are in different steps and wait for each other: rank 0 is in step 7 of 'train' on x: "
        "float32(16, 8) and waits for 'tensor of 1' from rank 1; rank 1 is in step 7 of program 2 and waits until "
        "rank 0 takes 'tensor of 2'. Every rank must call the same steps in the same order, and the ranks of a "
        "replica with batches of the same shapes."
    )


def test_one_step_function_in_two_of_its_steps_is_a_circle() -> None:
    """A rank caught an error of step 7 and went on to step 8 of the same function."""
    looking = watch(World(status(0, 1, 1), {**status(1, 1, 0, step=8), "step": 8}))
    looking.look()
    with pytest.raises(RankMismatchError, match=r"rank 0 is in step 7 of .*; rank 1 is in step 8 of ") as error:
        looking.look()
    assert "An error of a step that one rank catches leaves the others in that step" in str(error.value)


def test_a_circle_of_three_is_found() -> None:
    looking = watch(World(status(0, 2, 2), status(1, 1, 0), status(2, 1, 1)))
    looking.look()
    with pytest.raises(RankMismatchError, match=r"rank 0 is in .* rank 2; rank 2 is in .* rank 1; rank 1 is in"):
        looking.look()


@pytest.mark.parametrize(
    "statuses",
    [
        [status(0, 1, 1), status(1, 1, 0)],
        [status(0, 1, 1), None],
        [status(0, 1, 1), status(1, 2, None)],
        [status(0, 1, 1), {**status(1, 2, 0), "in_step": False}],
        [{**status(0, 1, 1), "in_step": False}, status(1, 2, 0)],
        [status(0, 1, 1), status(1, 2, 0, seconds=4.9)],
        [status(0, 1, 1), status(1, 2, 0, of=0xFFFFFFFF00000000)],
        [status(0, 1, 1), status(1, 2, 2), status(2, 2, 1)],
    ],
    ids=["one_step", "silent", "computing", "outside", "outside_itself", "briefly", "no_tensor", "circle_of_others"],
)
def test_anything_else_is_left_alone(statuses: list[Any]) -> None:
    looking = watch(World(*statuses))
    for _ in range(3):
        looking.look()


EXCHANGE = "what it has to say"


@pytest.mark.parametrize(
    ("statuses", "words"),
    [
        (
            [message(0, "in smp.recv_from rank 1", 1), message(1, "in smp.recv_from rank 0", 0)],
            "rank 0 is in smp.recv_from rank 1 and waits for an object of rank 1; "
            "rank 1 is in smp.recv_from rank 0 and waits for an object of rank 0. Each smp.send",
        ),
        (
            [message(0, "in smp.send to rank 1", 1, is_send=True), message(1, "at smp.barrier", 0, EXCHANGE)],
            "rank 0 is in smp.send to rank 1 and waits until rank 1 takes an object; "
            "rank 1 is at smp.barrier and waits for what it has to say of rank 0. Each smp.send",
        ),
        (
            [message(0, "in smp.recv_from rank 1", 1), status(1, 2, 0)],
            "rank 0 is in smp.recv_from rank 1 and waits for an object of rank 1; "
            "rank 1 is in step 7 of program 2 and waits for 'tensor of 2' from rank 0. Each smp.send",
        ),
        (
            [message(0, "at one", 1, EXCHANGE), message(1, "at another", 0, EXCHANGE)],
            "rank 0 is at one and waits for what it has to say of rank 1; rank 1 is at another and waits for",
        ),
    ],
    ids=["both receive", "send and barrier", "message and step", "two exchanges"],
)
def test_ranks_in_messages_that_wait_for_each_other_are_named(statuses: list[Any], words: str) -> None:
    looking = watch(World(*statuses))
    looking.look()
    with pytest.raises(RankMismatchError) as error:
        looking.look()
    assert str(error.value).startswith(f"The ranks wait for each other, and none can go on: {words}")


@pytest.mark.parametrize(
    "statuses",
    [
        [message(0, "in smp.recv_from rank 1", 1), {**message(1, "", 0), "activity": ""}],
        [message(0, "in smp.recv_from rank 1", 1), message(1, "in smp.recv_from rank 0", 0, seconds=4.0)],
        [message(0, "in smp.recv_from rank 1", 1), {**message(1, "new", 0), "activity_seconds": 4.0}],
        [message(0, "at the plan of step 'x'", 1, EXCHANGE), status(1, 2, 0)],
        [message(0, "in smp.recv_from rank 1", 1), message(1, "in smp.recv_from rank 2", 2), status(2, 1, None)],
        [message(0, "in smp.recv_from rank 1", 1), message(1, "at a barrier", 0, IN_BACKGROUND)],
    ],
    ids=["another thread", "briefly", "another call", "the exchange finds it", "who computes", "a save in a thread"],
)
def test_other_messages_are_left_alone(statuses: list[Any]) -> None:
    looking = watch(World(*statuses))
    for _ in range(3):
        looking.look()


def test_ranks_that_move_on_are_left_alone() -> None:
    world = World(status(0, 1, 1), status(1, 2, 0))
    looking = watch(world)
    for number in range(4):
        world.statuses[1] = status(1, 2, 0, label=f"tensor {number}")
        looking.look()


def test_the_thread_tells_all_ranks_and_ends() -> None:
    world = World(status(0, 1, 1), status(1, 2, 0))
    looking = watch(world, interval=0.01)
    looking.start()
    looking._thread.join(20)
    assert not looking._thread.is_alive()
    assert len(world.told) == 1
    assert "wait for each other" in world.told[0]
    looking.stop()


def test_stop_ends_the_thread_at_once() -> None:
    looking = watch(World(status(0, 1, None)), interval=3600.0)
    looking.start()
    looking.stop()
    assert not looking._thread.is_alive()


def test_the_thread_looks_beside_at_what_no_message_shows() -> None:
    def beside() -> None:
        raise RankMismatchError("replicas are in different steps")

    world = World(status(0, 1, None))
    looking = StepWatch(world, "rank {}".format, interval=0.01, other_look=beside)  # type: ignore[arg-type]
    looking.start()
    looking._thread.join(20)
    assert world.told == ["replicas are in different steps"]
    looking.stop()


def test_a_look_that_fails_is_said_once_and_the_job_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """It ended the job, as any exception of a thread does that nobody catches."""
    looks: list[None] = []
    third = threading.Event()

    def beside() -> None:
        looks.append(None)
        if len(looks) == 3:
            third.set()
        raise KeyError("step_seconds\x1b[2J")

    world = World({"rank": 0})
    looking = StepWatch(world, "rank {}".format, interval=0.01, other_look=beside)  # type: ignore[arg-type]
    looking.start()
    assert third.wait(20)
    looking.stop()
    assert world.told == []
    assert capsys.readouterr().err == (
        "smp_tf: rank 0 could not look whether ranks wait for each other: KeyError('in_step'). The job goes on; it "
        "looks again every 0.01 s.\n"
    )
