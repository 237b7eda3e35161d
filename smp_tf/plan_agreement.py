"""All ranks run the same step by the same plan: rank 0 decides, everyone checks that it traced the same thing."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

from smp_tf import runtime
from smp_tf.agreement import require_agreement
from smp_tf.errors import RankMismatchError
from smp_tf.partition.fingerprint import difference, outline
from smp_tf.partition.op_graph import OpGraph
from smp_tf.partition.plan import Plan
from smp_tf.partition.report import render
from smp_tf.process_sets import exchange_bytes


def agree_on_plan(step: str, arguments: Mapping[str, str], proposed: Plan, graph: OpGraph) -> Plan:
    """The plan of rank 0, once all ranks are known to have traced the same step.

    Args:
        step: name of the step function.
        arguments: its tensor arguments, name to type.
        proposed: what this rank would do.
        graph: the op graph it traced.

    Returns:
        The plan of rank 0.

    Raises:
        RankMismatchError: a rank traced another step, or was given another batch; the message says which and where.
    """
    running = runtime.current()
    if running.topology.size == 1:
        return proposed
    rank = running.topology.rank
    said = {
        "step": step,
        "arguments": dict(arguments),
        "fingerprint": proposed.fingerprint,
        "plan": proposed.to_json() if rank == 0 else None,
    }
    payloads = exchange_bytes(json.dumps(said).encode(), f"smp_plan_{step}")
    everyone = [json.loads(payload) for payload in payloads]
    require_agreement(
        "which step to run next",
        {number: {"step": other["step"], "arguments": other["arguments"]} for number, other in enumerate(everyone)},
        running.topology.describe,
        "Every rank must call the same steps in the same order, with batches of the same shapes.",
    )
    if len({other["fingerprint"] for other in everyone}) > 1:
        _explain_difference(step, graph)
    return Plan.from_json(everyone[0]["plan"])


def _explain_difference(step: str, graph: OpGraph) -> None:
    running = runtime.current()
    ours = outline(graph)
    outlines = [
        tuple(json.loads(payload)) for payload in exchange_bytes(json.dumps(ours).encode(), f"smp_outline_{step}")
    ]
    for rank, theirs in enumerate(outlines[1:], start=1):
        where = difference(outlines[0], theirs, "rank 0", running.topology.describe(rank))
        if where:
            raise RankMismatchError(
                f"The ranks traced different models for step {step!r}. {where} Every rank must build the same model "
                f"in the same way; nothing in it may depend on the rank."
            )


def show_plan(plan: Plan) -> None:
    """Print the plan as a table, on rank 0."""
    if runtime.current().topology.rank == 0 and plan.stages > 1:
        print(render(plan), file=sys.stderr, flush=True)
