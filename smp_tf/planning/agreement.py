"""Makes all ranks run a step by the same plan. Rank 0 decides, and all ranks check that they traced the same step.

a variable without an owner, or the first call of      all ranks agree: replicas come to it together
a step that gives gradients
another batch size, shape or Python value; a step      the ranks of this replica agree: the others may have had
without gradients                                      it before, or never get it
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smp_tf.announce import columns, tell
from smp_tf.batch.microbatches import SplitArgument
from smp_tf.batch.sliced_objects import kind_in_words, spec_in_words
from smp_tf.errors import MemoryLimitError, PlacementError, RankMismatchError
from smp_tf.job import program_numbers, runtime
from smp_tf.job.agreement import require_agreement
from smp_tf.job.exchange import allgather_json
from smp_tf.job.seeds import seed_set_since
from smp_tf.partition.graph.fingerprint import difference, fingerprint, form, outline
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.mesh import CommGroup
from smp_tf.partition.plan.plan import Plan
from smp_tf.partition.plan.report import render
from smp_tf.pipeline.errors import ScheduleError
from smp_tf.variables import step_seeds
from smp_tf.watch.deadlock import SAME_STEPS


def agree_on_plan(
    step: str,
    arguments: Sequence[SplitArgument],
    graph: OpGraph,
    propose: Callable[..., Plan],
    owners: Mapping[int, int],
    *,
    everywhere: bool,
    known_as: str,
) -> tuple[Plan, int]:
    """Returns the plan of the first rank, once all have traced the same step, and a number for the program.

    The ranks of a replica must have traced the same ops, down to the last one. Replicas have their own batches. Where
    these differ in size, so do the graphs, and only the step's form must be the same: its variables, the layers that it
    calls and the gradients that it gives. The owners of variables are the same everywhere.

    The seed of random ops in steps is decided with the plan. Rank 0's script decides it, if it has set a seed since
    `smp.init`.

    Args:
        step: name of the step function.
        arguments: tensor arguments of the step.
        graph: the op graph that this rank traced.
        propose: returns a plan, given the stages of decided variables by index. Only the first rank's is called.
        owners: the owners that an earlier step decided.
        everywhere: whether all replicas call this now, as they must where owners are decided; else only this one does.
        known_as: what the step function is known by on all ranks.

    Returns:
        The plan, and a number that no rank of this replica has used for a program before.

    Raises:
        RankMismatchError: a rank traced another step, or was given another batch. The message says which rank, and
            where they differ.
        PlacementError: the first rank has no plan. All ranks raise its error.
    """
    running = runtime.current()
    if running.topology.size == 1:
        proposed = propose(owners)
        step_seeds.decide_seed(seed_set_since())
        return proposed, program_numbers.use_next([program_numbers.used()])
    words = {argument.name: spec_in_words(argument.spec) for argument in arguments}
    group = CommGroup.WORLD if everywhere else CommGroup.MP_GROUP
    members = running.topology.members(group)
    own = fingerprint(graph)
    said = {
        "step": step,
        "arguments": words,
        "kinds": {argument.name: kind_in_words(argument.spec) for argument in arguments},
        "programs": program_numbers.used(),
        "fingerprint": own,
        "form": hashlib.sha256("\n".join(form(graph)).encode()).hexdigest(),
        "proposal": _proposal(functools.partial(propose, owners)) if running.topology.rank == members[0] else None,
        "seed": seed_set_since(),
    }
    doing = f"about to run step {step!r} for the first time on {_in_words(words)}"
    heard = allgather_json(said, group, name=f"the plan of step {step!r}", doing=doing)
    everyone = dict(zip(members, heard, strict=True))
    _require_same_step(everyone)
    unlike = [c for c in _comparisons(everyone) if everyone[c.rank][c.what] != everyone[c.like][c.what]]
    if unlike:
        _explain_difference(step, graph, group, members, unlike)
    number = program_numbers.use_next(other["programs"] for other in heard)
    step_seeds.decide_seed(heard[0]["seed"])
    program_numbers.say(number, f"{step!r} on {_in_words(words)}")
    plan = _plan_in(heard[0]["proposal"])
    if own != plan.fingerprint:
        owned = {v.index: plan.owners[v.name] for v in graph.variables if v.in_model}
        plan = _plan_of_replica(step, functools.partial(propose, owned, plan))
    return plan, number


def _require_same_step(everyone: Mapping[int, Mapping[str, Any]]) -> None:
    """Raises an error unless all ranks run the same step, and those of each replica on batches of the same sizes."""
    running = runtime.current()
    require_agreement(
        "which step to run next",
        {rank: {"step": said["step"], "arguments": said["kinds"]} for rank, said in everyone.items()},
        running.topology.describe,
        SAME_STEPS,
    )
    for ranks in _replicas(everyone):
        require_agreement(
            "which step to run next",
            {rank: {"arguments": everyone[rank]["arguments"]} for rank in ranks},
            running.topology.describe,
            SAME_STEPS,
        )


def _replicas(ranks: Iterable[int]) -> list[tuple[int, ...]]:
    """Returns the replicas of given ranks, each with its first rank first."""
    mesh = runtime.current().topology.mesh
    return list(dict.fromkeys(mesh.members(CommGroup.MP_GROUP, rank) for rank in ranks))


@dataclass(frozen=True)
class _Comparison:
    """A rank, the rank that it must be like, and in what: "fingerprint", down to the last op, or "form"."""

    rank: int
    like: int
    what: str


def _comparisons(everyone: Mapping[int, Mapping[str, Any]]) -> list[_Comparison]:
    """Yields what to compare: first ranks of replicas with rank 0, and other ranks with their replica's first."""
    (root, *_), *_ = replicas = _replicas(everyone)
    found = []
    for first, *others in replicas:
        same_sizes = everyone[first]["arguments"] == everyone[root]["arguments"]
        found.append(_Comparison(first, root, "fingerprint" if same_sizes else "form"))
        found += [_Comparison(other, first, "fingerprint") for other in others]
    return found


def _plan_of_replica(step: str, propose: Callable[[], Plan]) -> Plan:
    """Returns the plan of this replica's first rank. It is like rank 0's plan, but for another graph."""
    topology = runtime.current().topology
    first = topology.rank == topology.members(CommGroup.MP_GROUP)[0]
    mine = _proposal(propose) if first else None
    said = allgather_json(mine, CommGroup.MP_GROUP, name=f"the plan of step {step!r} for this replica's batches")
    return _plan_in(said[0])


def _proposal(propose: Callable[[], Plan]) -> dict[str, str]:
    """Returns a rank's plan, or why it has none, for the ranks that follow it."""
    try:
        return {"plan": propose().to_json()}
    except MemoryLimitError as error:
        return {"too large": str(error)}
    except (PlacementError, ScheduleError) as error:
        return {"refused": str(error)}


def _plan_in(proposal: Mapping[str, str]) -> Plan:
    """Returns the plan in a rank's proposal. Where it has none, all ranks raise its error."""
    if "too large" in proposal:
        raise MemoryLimitError(proposal["too large"])
    if "refused" in proposal:
        raise PlacementError(proposal["refused"])
    return Plan.from_json(proposal["plan"])


def _explain_difference(
    step: str, graph: OpGraph, group: CommGroup, members: Sequence[int], unlike: Sequence[_Comparison]
) -> None:
    """Raises an error with the first difference between ranks that must be alike."""
    describe = runtime.current().topology.describe
    mine = {"fingerprint": list(outline(graph)), "form": list(form(graph))}
    heard = allgather_json(mine, group, name=f"what step {step!r} looks like")
    lines = dict(zip(members, heard, strict=True))
    for c in unlike:
        where = difference(lines[c.like][c.what], lines[c.rank][c.what], f"rank {c.like}", describe(c.rank))
        if where:
            raise RankMismatchError(
                f"The ranks traced different models for step {step!r}. {where} Every rank must build the same model "
                f"in the same way; nothing in it may depend on the rank."
            )


def _in_words(arguments: Mapping[str, str]) -> str:
    return ", ".join(f"{name}: {kind}" for name, kind in arguments.items()) or "no arguments"


def show_plan(plan: Plan) -> None:
    """Prints the plan as a table, on rank 0."""
    if runtime.current().topology.rank == 0 and plan.stages > 1:
        tell(render(plan, columns()))
