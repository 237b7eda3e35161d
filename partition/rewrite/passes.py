"""The passes over the op graph of a step, in order. They run after the trace and before anything is placed.

    traced graph ──▶ random ──▶ unneeded ──▶ measurements ──▶ units, plan, cut

A new pass is an entry of `PASSES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.rewrite.measurements import leave_the_model
from smp_tf.partition.rewrite.prune import prune
from smp_tf.partition.rewrite.randomness import make_stateless

#: A function that takes a sentence for the user.
Say = Callable[[str], None]


class Pass(NamedTuple):
    """One pass.

    Args:
        name: unique among them.
        why: what would be wrong without it.
        function: takes the graph and a function for sentences to the user, and returns the new graph. Where there is
            nothing to do, it returns the same graph.
    """

    name: str
    why: str
    function: Callable[[OpGraph, Say], OpGraph]


#: The name of the pass that makes random ops depend on a seed.
RANDOM = "random"

PASSES: tuple[Pass, ...] = (
    Pass(
        RANDOM,
        "A random op draws from a state of its own, which no checkpoint holds and which depends on the cut.",
        make_stateless,
    ),
    Pass(
        "unneeded",
        "What nothing needs, such as gradients that the step does not return, would be placed, cut and sent.",
        lambda graph, say: prune(graph),
    ),
    Pass(
        "measurements",
        "A metric in a layer's call writes a variable that all ranks have, and the layer runs on one of them.",
        lambda graph, say: leave_the_model(graph),
    ),
)


@dataclass(frozen=True)
class Rewritten:
    """A graph after all passes.

    Args:
        graph: the graph.
        changed_by: names of the passes that have changed it.
    """

    graph: OpGraph
    changed_by: frozenset[str]


def rewrite(graph: OpGraph, say: Say, passes: Sequence[Pass] = PASSES) -> Rewritten:
    """Runs passes over a graph, one after the other.

    Args:
        graph: the op graph of a step, as traced.
        say: takes sentences for the user.
        passes: the passes, in order.

    Returns:
        The graph that is placed and cut, with the passes that have changed it.
    """
    changed_by = set()
    for one in passes:
        made = one.function(graph, say)
        if made is not graph:
            changed_by.add(one.name)
        graph = made
    return Rewritten(graph, frozenset(changed_by))
