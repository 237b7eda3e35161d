"""Ranks agree on a step: those of a replica to the last op, replicas on what does not depend on the size of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from smp_tf.batch.microbatches import SplitArgument
from smp_tf.errors import MemoryLimitError, PlacementError, RankMismatchError
from smp_tf.job import program_numbers
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.plan.plan import Plan
from smp_tf.pipeline.planner import proposal
from smp_tf.pipeline.planner.request import Aim, Course, PlacementRequest, Storage
from smp_tf.pipeline.planner.times_by_size import UnitTimes
from smp_tf.planning import agreement
from tests.partition.op_graph_builder import chain_of_dense
from tests.smp_tf.rank_threads import Ranks

TWO = PlacementRequest(Course("simple", 2, 2), Storage(slots=0.0), Aim("memory"))

SLOW_FIRST = {"net/dense_0": (0.9, 0.9), **{f"net/dense_{n}": (0.1, 0.1) for n in (1, 2, 3)}}


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Two replicas, of ranks 0 and 1 and of ranks 2 and 3."""
    ranks = Ranks(monkeypatch, 4, 2)
    for module in (agreement, program_numbers):
        monkeypatch.setattr(module, "runtime", SimpleNamespace(current=lambda: ranks._here.runtime))
    monkeypatch.setattr(agreement, "step_seeds", SimpleNamespace(decide_seed=lambda seed: None))
    return ranks


def agree(
    batch: int,
    graph: OpGraph,
    request: PlacementRequest = TWO,
    everywhere: bool = True,
    propose: Callable[..., Plan] | None = None,
) -> tuple[Plan, int]:
    arguments = [SplitArgument("x", 0, tf.TensorSpec([batch, 8], tf.float32))]

    def planned(owners: Any, like: Plan | None = None) -> Plan:
        return proposal.propose(graph, request if like is None else request.like(like), owners)

    propose = propose or planned
    return agreement.agree_on_plan("train", arguments, graph, propose, {}, everywhere=everywhere, known_as="train/0")


def with_other_op(graph: OpGraph) -> OpGraph:
    """The same layers and variables, with Tanh in place of Relu."""
    nodes = tuple(dataclasses.replace(n, op="Tanh") if n.op == "Relu" else n for n in graph.nodes)
    return dataclasses.replace(graph, nodes=nodes)


def relu(batch: int) -> OpGraph:
    return chain_of_dense(4, batch=batch)


def tanh(batch: int) -> OpGraph:
    return with_other_op(chain_of_dense(4, batch=batch))


def longer(batch: int) -> OpGraph:
    return chain_of_dense(5, batch=batch)


def refusals(results: list[Any]) -> set[str]:
    """The one error that all ranks must have got."""
    assert all(isinstance(result, RankMismatchError) for result in results), results
    return {str(result) for result in results}


def test_replicas_have_batches_of_their_own_and_the_same_owners(four: Ranks) -> None:
    # Rank 0 would cut elsewhere than the others: what it says counts, also for another graph.
    odd = TWO.changed(objective="speed", times=UnitTimes(SLOW_FIRST))

    def act(rank: int) -> tuple[Plan, int]:
        batch = 4 if rank < 2 else 6
        return agree(2 * batch, chain_of_dense(4, batch=batch), request=odd if rank == 0 else TWO)

    plans, numbers = zip(*four.run(act), strict=True)
    assert [list(plan.units.values()) for plan in plans] == [[0, 1, 1, 1]] * 4
    assert [plan.owners for plan in plans] == [plans[0].owners] * 4
    assert plans[0] == plans[1] != plans[2] == plans[3]
    (number,) = set(numbers)
    # Whose leaving is told of.
    assert [t.program_ranks for t in four.transports] == [{number: mine} for mine in ([0, 1], [0, 1], [2, 3], [2, 3])]


@pytest.mark.parametrize("choice", [{"schedule": "auto"}, {"schedule": "zb_v"}, {"contiguous": False}])
def test_replicas_have_the_same_chunks(four: Ranks, choice: dict[str, Any]) -> None:
    """Bug: a replica with batches of another size was given owners by chunk, and planned with chunks of its own."""
    request = TWO.changed(microbatches=4, **choice)

    def act(rank: int) -> tuple[Plan, int]:
        batch = 4 if rank < 2 else 6
        return agree(4 * batch, chain_of_dense(6, width=64, batch=batch, tied=(0, 5)), request=request)

    plans = [plan for plan, _ in four.run(act)]
    assert len({(plan.placement, plan.schedule) for plan in plans}) == 1
    assert len(plans[0].placement) == {"zb_v": 4, None: 3}.get(choice.get("schedule"), len(plans[0].placement))
    assert [plan.owners for plan in plans] == [plans[0].owners] * 4


def test_the_ranks_of_a_replica_have_the_same_batch(four: Ranks) -> None:
    results = four.run(lambda rank: agree(8 if rank != 3 else 12, chain_of_dense(4, batch=4 if rank != 3 else 6)))
    (said,) = refusals(results)
    assert said.splitlines()[0] == "The ranks do not agree on which step to run next:"
    assert (
        said.splitlines()[1] == "  arguments.x: rank 3 (host host, pid 103, stage 1 of replica 1) has "
        "'float32(12, 8)'; rank 2 has 'float32(8, 8)'"
    )


@pytest.mark.parametrize(
    ("sizes", "graphs", "said"),
    [
        # In a replica, to the last op.
        (
            (4, 4),
            (relu, relu, relu, tanh),
            "rank 2 has op Relu giving float32[4,8] in layer 'net/dense_0', rank 3 (host host, pid 103, stage 1 of "
            "replica 1) has op Tanh giving",
        ),
        # Between replicas with batches of one size, too.
        (
            (4, 4),
            (relu, relu, tanh, tanh),
            "rank 0 has op Relu giving float32[4,8] in layer 'net/dense_0', rank 2 (host host, pid 102, stage 0 of "
            "replica 1) has op Tanh giving",
        ),
        # With batches of different sizes: variables, layers, results.
        (
            (4, 6),
            (relu, relu, longer, longer),
            "rank 0 has layer 'net' of type Model, rank 2 (host host, pid 102, stage 0 of replica 1) has variable "
            "'net/dense_4/kernel' of type float32[8,8], trainable, of the model",
        ),
    ],
)
def test_another_model_is_told_with_where_it_differs(
    four: Ranks, sizes: tuple[int, int], graphs: tuple[Callable[[int], OpGraph], ...], said: str
) -> None:
    def act(rank: int) -> tuple[Plan, int]:
        batch = sizes[rank // 2]
        return agree(2 * batch, graphs[rank](batch))

    (words,) = refusals(four.run(act))
    assert words.startswith("The ranks traced different models for step 'train'. The first difference: " + said)


def test_a_batch_that_is_new_to_one_replica_concerns_no_other(four: Ranks) -> None:
    numbers = [number for _, number in four.run(lambda rank: agree(8, chain_of_dense(4)))]

    def act(rank: int) -> Any:
        return agree(12, chain_of_dense(4, batch=6), everywhere=False) if rank > 1 else None

    again = four.run(act)
    assert again[:2] == [None, None]
    assert again[2] == again[3]
    assert again[2][1] > max(numbers)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (MemoryLimitError, "Rank 0 would need 3 GiB."),
        (PlacementError, "A model of 4 layers fills no 5 partitions."),
    ],
)
def test_what_the_first_rank_refuses_every_rank_refuses(four: Ranks, kind: type[Exception], words: str) -> None:
    """Each rank once proposed for itself, and one that had a plan went on alone."""

    def refuse(owners: Any) -> Plan:
        raise kind(words)

    def act(rank: int) -> tuple[Plan, int]:
        return agree(8, chain_of_dense(4), propose=refuse if rank == 0 else None)

    results = four.run(act)
    assert [(type(result), str(result)) for result in results] == [(kind, words)] * 4
