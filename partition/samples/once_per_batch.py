"""Chooses what of a step runs once per batch, after its microbatches, and takes it out of the microbatches' graph.

    microbatch 0 ─ layers ─▶ rows ┐
    microbatch 1 ─ layers ─▶ rows ┴─ joined ─▶ tail of the whole batch's graph ─▶ logs, metrics' states

Where a step makes something of its gradients that is not linear in them, such as a norm to clip by, that runs once per
batch too, on the averages of the microbatches' gradients.

A state of the script, such as a metric's, is written in one of the two places. So what belongs to it goes together: a
result that reads a state runs where the state is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from smp_tf.partition.graph.op_graph import OpGraph, Tensor
from smp_tf.partition.graph.order_of_writes import last_write_before
from smp_tf.partition.samples.batch_tail import Tail, find_tail
from smp_tf.partition.samples.sample_rows import Rows

#: How the names of results begin that are what a variable holds.
STATE = "state "


@dataclass(frozen=True)
class GradientUses:
    """What a step makes of its gradients.

    Args:
        given: by what stands for a gradient in the whole batch's graph, the gradient in the microbatch's.
        applied: by name, what is given to an optimizer: in the whole batch's graph and in the microbatch's.
    """

    given: Mapping[Tensor, Tensor]
    applied: Mapping[str, tuple[Tensor, Tensor]]


class NotOnceError(Exception):
    """What a step makes of its gradients cannot be computed once per batch."""


@dataclass(frozen=True)
class OncePerBatch:
    """What of a step runs once per batch.

    Args:
        tail: what runs, of the whole batch's graph; its results are logs, and states by `state_name`.
        logs: names of the results that are no states.
        states: indices, in the whole batch's graph, of the script's variables that it writes.
        part: the microbatch's graph, with the same nodes, in which these variables are no longer written.
        left_out: why the other results and states are not among them, by name.
    """

    tail: Tail
    logs: frozenset[str]
    states: frozenset[int]
    part: OpGraph
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)


def state_name(index: int) -> str:
    """Returns under what name a tail gives what a variable of the script holds.

    Args:
        index: the variable, in the whole batch's graph.
    """
    return f"{STATE}{index}"


def writers_of_states(graph: OpGraph) -> dict[int, tuple[int, ...]]:
    """Returns, by variable of the script that a step writes, the numbers of the nodes that do.

    Args:
        graph: the step.
    """
    found: dict[int, list[int]] = {}
    for number, node in enumerate(graph.nodes):
        for index in node.writes:
            # How far a generator of random numbers is.
            if not graph.variables[index].in_model and not node.op.startswith("Rng"):
                found.setdefault(index, []).append(number)
    return {index: tuple(numbers) for index, numbers in found.items()}


def find_once_per_batch(
    rows: Rows,
    whole: OpGraph,
    part: OpGraph,
    logs: Mapping[str, tuple[Tensor, Tensor]],
    same: Mapping[int, int],
    uses: GradientUses | None = None,
    *,
    of_samples: bool = True,
) -> OncePerBatch:
    """Chooses what of a step runs once per batch.

    Args:
        rows: what the tensors of the whole batch's graph are made of.
        whole: the step, traced for all samples of a batch.
        part: the step, traced for a microbatch.
        logs: by name, a tensor that the step returns: in `whole` and in `part`.
        same: by index of a variable in `whole`, its index in `part`.
        uses: what the step makes of its gradients, where that is to run once per batch.
        of_samples: whether samples may go into it. Otherwise it is made of gradients and weights alone.

    Returns:
        The choice: as much as can be computed of what microbatches make.

    Raises:
        NotOnceError: what it makes of its gradients is not among that.
    """
    given, applied = (uses.given, uses.applied) if uses is not None else ({}, {})
    kept = [t for t in part.outputs if t not in {tensor for _, tensor in applied.values()}] + list(given.values())
    writers = {index: numbers for index, numbers in writers_of_states(whole).items() if index in same}
    states, chosen = set(writers), set(logs)
    left_out: dict[str, str] = {}
    while True:
        wanted: dict[str, tuple[Tensor | int, ...]] = {name: (logs[name][0],) for name in logs if name in chosen}
        wanted.update({state_name(index): writers[index] for index in writers if index in states})
        wanted.update({name: (tensor,) for name, (tensor, _) in applied.items()})
        tail = find_tail(whole, rows, wanted, given, of_samples=of_samples)
        for name in applied:
            if name in tail.left_out:
                raise NotOnceError(tail.left_out[name])
        left_out.update(tail.left_out)
        possible = {index for index in states if state_name(index) in tail.results}
        possible &= _written_apart(whole, possible)
        without = _without_writes(part, {same[index] for index in possible})
        returned = [t for t in kept if t not in {logs[name][1] for name in chosen & set(tail.results)}]
        touched = _touched_by(without, returned, part)
        possible = {index for index in possible if same[index] not in touched}
        # What reads a state that microbatches write has to be computed of them too.
        elsewhere = {index for index in range(len(whole.variables)) if not whole.variables[index].read_only} - possible
        allowed = {name for name in chosen if name in tail.results and not tail.touched[name] & elsewhere}
        possible = {index for index in possible if not tail.touched[state_name(index)] & elsewhere}
        if possible == states and allowed == chosen:
            for name in applied:
                if read := tail.touched[name] & elsewhere:
                    which = whole.variables[min(read)].name
                    raise NotOnceError(f"it reads {which!r}, which every microbatch writes")
            return OncePerBatch(tail, frozenset(chosen), frozenset(states), without, left_out)
        for name in {*chosen - allowed, *map(state_name, states - possible)}:
            left_out.setdefault(name, "microbatches read or write a variable of the script that it needs")
        states, chosen = possible, allowed


def _written_apart(graph: OpGraph, states: Collection[int]) -> set[int]:
    """Returns those states that no op writes together with another variable that is none of them."""
    mixed = {
        index for node in graph.nodes if node.writes and not set(node.writes) <= set(states) for index in node.writes
    }
    return set(states) - mixed


def _without_writes(graph: OpGraph, variables: Collection[int]) -> OpGraph:
    """Returns a graph with the same nodes, in which those that write some variables have no effect.

    Nothing waits for them either, so what only they need goes with the passes that follow.
    """
    dropped = {n for n, node in enumerate(graph.nodes) if node.writes and set(node.writes) <= set(variables)}
    if not dropped:
        return graph
    nodes = list(graph.nodes)
    for number, node in enumerate(graph.nodes):
        if not dropped.isdisjoint(node.control):
            control = tuple(before for before in node.control if before not in dropped)
            nodes[number] = dataclasses.replace(node, control=control)
    for number in dropped:
        nodes[number] = dataclasses.replace(nodes[number], writes=(), stateful=False)
    read_only = [dataclasses.replace(v, read_only=v.read_only or v.index in variables) for v in graph.variables]
    return dataclasses.replace(graph, nodes=tuple(nodes), variables=tuple(read_only))


def _touched_by(graph: OpGraph, returned: Collection[Tensor], part: OpGraph) -> set[int]:
    """Returns the variables that are written, or read after a write, for what a step returns and its other effects.

    Args:
        graph: the microbatch's graph, in which some variables are no longer written.
        returned: what the step returns.
        part: the same graph, in which all are.
    """
    wanted = [t.node for t in returned] + [n for n, node in enumerate(graph.nodes) if node.stateful]
    found: set[int] = set()
    for number in graph.ancestors(wanted):
        node = graph.nodes[number]
        found.update(node.writes)
        for index in part.written_states.intersection(node.reads) - found:
            if last_write_before(part, number, index) is not None:
                found.add(index)
    return found
