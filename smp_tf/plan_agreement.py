"""All ranks run the same step by the same plan: rank 0 decides, everyone checks that it traced the same thing."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from smp_tf import runtime, step_random
from smp_tf.agreement import require_agreement
from smp_tf.control import allgather_json
from smp_tf.deadlock import SAME_STEPS
from smp_tf.errors import RankMismatchError
from smp_tf.partition.fingerprint import difference, outline
from smp_tf.partition.op_graph import OpGraph
from smp_tf.partition.plan import Plan
from smp_tf.partition.report import render
from smp_tf.seeds import seed_set_since
from smp_tf.step_watch import name_program
from smp_tf.topology import CommGroup

#: Highest program number this process has used; numbers are never used twice, since messages bear them.
_used = 0


def agree_on_plan(step: str, arguments: Mapping[str, str], proposed: Plan, graph: OpGraph) -> tuple[Plan, int]:
    """The plan of rank 0, once all ranks are known to have traced the same step, and a number for the program.

    What random ops in steps draw from is decided with it: by rank 0's script, if it has set a seed since `smp.init`.

    Args:
        step: name of the step function.
        arguments: its tensor arguments, name to type.
        proposed: what this rank would do.
        graph: the op graph it traced.

    Returns:
        The plan of rank 0, and a number that no rank has used for a program before.

    Raises:
        RankMismatchError: a rank traced another step, or was given another batch; the message says which and where.
    """
    running = runtime.current()
    global _used
    if running.topology.size == 1:
        step_random.decide_seed(seed_set_since())
        _used += 1
        return proposed, _used
    rank = running.topology.rank
    said = {
        "step": step,
        "arguments": dict(arguments),
        "programs": _used,
        "fingerprint": proposed.fingerprint,
        "plan": proposed.to_json() if rank == 0 else None,
        "seed": seed_set_since(),
    }
    doing = f"about to run step {step!r} for the first time on {_in_words(arguments)}"
    everyone = allgather_json(said, name=f"the plan of step {step!r}", doing=doing)
    require_agreement(
        "which step to run next",
        {number: {"step": other["step"], "arguments": other["arguments"]} for number, other in enumerate(everyone)},
        running.topology.describe,
        SAME_STEPS,
    )
    if len({other["fingerprint"] for other in everyone}) > 1:
        _explain_difference(step, graph)
    _used = 1 + max(other["programs"] for other in everyone)
    step_random.decide_seed(everyone[0]["seed"])
    name_program(_used, f"{step!r} on {_in_words(arguments)}")
    return Plan.from_json(everyone[0]["plan"]), _used


def agree_on_number(doing: str) -> int:
    """A number that no rank of this replica has used for a program before.

    Args:
        doing: what the program computes, in words; the same on all ranks of the replica.

    Returns:
        The number, equal on all of them.

    Raises:
        RankMismatchError: a rank does something else.
    """
    global _used
    said = allgather_json(_used, CommGroup.MP_GROUP, name=doing, doing=f"about to compute {doing}")
    _used = 1 + max(said)
    name_program(_used, repr(doing))
    return _used


def _explain_difference(step: str, graph: OpGraph) -> None:
    running = runtime.current()
    outlines = allgather_json(list(outline(graph)), name=f"what step {step!r} looks like")
    for rank, theirs in enumerate(outlines[1:], start=1):
        where = difference(outlines[0], theirs, "rank 0", running.topology.describe(rank))
        if where:
            raise RankMismatchError(
                f"The ranks traced different models for step {step!r}. {where} Every rank must build the same model "
                f"in the same way; nothing in it may depend on the rank."
            )


def _in_words(arguments: Mapping[str, str]) -> str:
    return ", ".join(f"{name}: {kind}" for name, kind in arguments.items()) or "no arguments"


def show_plan(plan: Plan) -> None:
    """Print the plan as a table, on rank 0."""
    if runtime.current().topology.rank == 0 and plan.stages > 1:
        print(render(plan), file=sys.stderr, flush=True)
