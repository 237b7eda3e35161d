"""Units: the smallest pieces of a model that a cut may separate.

The forward ops of the model are taken in the order they were made. A layer's own ops stay together;
ops that a model runs directly, between its layers, become units of one product each, with the cheap
ops around it:

    made:    Dense_0 ops │ AddV2 │ Mul │ Dense_1 ops │ MatMul │ Relu │ ...
                         └──┬────────┘ the fewest bytes cross here: this is where the two units part
    raw:     [ net/dense_0 ··· ] [ ··· net/dense_1 ] [ net/MatMul ]

Then the pieces that must stay together are contracted: colocated ops, all readers and writers of a variable that the
step writes, ops joined by a tensor that cannot leave its process, and the cycles that these contractions close. A
variable that is only read contracts nothing, since several stages may use it.

Some nodes belong to no unit: sources; constants and functions of constants, which are copied to where they are used;
ops between the step's arguments and the model; and ops that follow a gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

import networkx as nx

from smp_tf.partition.errors import PlacementError
from smp_tf.partition.graph.graph_facts import graph_fact
from smp_tf.partition.graph.node_def import colocated_with
from smp_tf.partition.graph.op_graph import (
    ARGUMENT,
    CAPTURE,
    HANDLE_DTYPES,
    SEED,
    SOURCES,
    UNSENDABLE_DTYPES,
    VARIABLE,
    OpGraph,
    Tensor,
)
from smp_tf.partition.graph.op_kinds import FUNCTION_OPS, MATRIX_OPS, SUM_OVER_REPLICAS

_HEAVY_OPS = MATRIX_OPS | FUNCTION_OPS

#: Name of the unit that holds what the step does with the model's output.
AFTER_MODEL = "loss and outputs"


@dataclass(frozen=True, slots=True)
class Unit:
    """Ops that are always placed together.

    Args:
        index: position in the topological order of the units.
        name: path of the layer call, such as "net/block_0/mlp". It is unique, and the same in every process.
        nodes: the unit's forward nodes, in order.
        backward: the backward nodes that differentiate these, in order.
        variables: variables of the model that its forward nodes use.
        stage: the stage that the script asked for, or None.
    """

    index: int
    name: str
    nodes: tuple[int, ...]
    backward: tuple[int, ...]
    variables: tuple[int, ...]
    stage: int | None = None


def build_units(graph: OpGraph, open_calls: Collection[int] = ()) -> tuple[Unit, ...]:
    """Groups the nodes of a step into units, in topological order.

    Args:
        graph: one microbatch of the step.
        open_calls: calls whose own ops may be separated although they call no other layer. Models, and layers that call
            layers, are always open.

    Returns:
        The units. The last one holds the ops after the model, if there are any.

    Raises:
        PlacementError: no op was made in a model, or two manual placements contradict each other.
    """
    member = _members(graph)
    if not member:
        raise PlacementError(
            "The step calls no distributed model, so there is nothing to place. Call the model inside the step."
        )
    fixed = constants(graph)
    after = _after_model(graph, member)
    raw = _raw_units(graph, member, after, frozenset(open_calls) | _open_calls(graph))
    groups = _ordered(graph, _contracted(graph, raw), after)
    unit_of = {number: index for index, nodes in enumerate(groups) for number in nodes}
    backward: dict[int, list[int]] = {}
    for number, index in _backward_units(graph, unit_of, fixed, len(groups)).items():
        backward.setdefault(index, []).append(number)
    names = _unique(_name(graph, nodes, after) for nodes in groups)
    used = _variables_used(graph, groups)
    return tuple(
        Unit(
            index=index,
            name=names[index],
            nodes=nodes,
            backward=tuple(backward.get(index, ())),
            variables=used[index],
            stage=_manual_stage(graph, nodes, names[index]),
        )
        for index, nodes in enumerate(groups)
    )


@graph_fact
def constants(graph: OpGraph) -> frozenset[int]:
    """Returns the nodes that give the same value in every step. They are stateless and made of constants alone."""
    return _made_of(graph, frozenset(), heavy=True)


@graph_fact
def copied(graph: OpGraph) -> frozenset[int]:
    """Returns the cheap nodes without effect that are made only of what every rank has.

    Every rank has arguments, captures, seeds and constants. Each stage that reads such a node makes it itself, so it is
    neither sent nor kept for backward.
    """
    return _made_of(graph, frozenset({ARGUMENT, CAPTURE, SEED}), heavy=False)


def _made_of(graph: OpGraph, sources: frozenset[str], heavy: bool) -> frozenset[int]:
    found: set[int] = set()
    for number, node in enumerate(graph.nodes):
        if node.op in SOURCES:
            if node.op in sources:
                found.add(number)
            continue
        if node.stateful or node.reads or node.writes or (not heavy and node.op in _HEAVY_OPS):
            continue
        is_made_of_them = bool(node.outputs) and found.issuperset(graph.data_from[number])
        if is_made_of_them and HANDLE_DTYPES.isdisjoint([kind.dtype for kind in node.outputs]):
            found.add(number)
    return frozenset(found)


@graph_fact
def weight_derived(graph: OpGraph) -> dict[int, frozenset[int]]:
    """Returns the nodes that can be computed from constants, and variables that the step never writes, alone.

    Returns:
        For each such node, the variables it depends on. Each stage that needs the value can make it from its copy of
        the variables, so it is neither sent nor kept for backward.
    """
    fixed = constants(graph)
    found: dict[int, frozenset[int]] = {}
    known = set(fixed)
    for number, node in enumerate(graph.nodes):
        if node.op in SOURCES or node.writes or node.backward or number in fixed or node.call == 0:
            continue
        if node.reads:
            if node.op == "ReadVariableOp" and all(graph.variables[v].read_only for v in node.reads):
                found[number] = frozenset(node.reads)
                known.add(number)
        elif not node.stateful and node.inputs and node.op not in _HEAVY_OPS and node.op != SUM_OVER_REPLICAS:
            before = graph.data_from[number]
            if known.issuperset(before):
                found[number] = frozenset[int]().union(*[found[n] for n in before if n in found])
                known.add(number)
    return found


# --- which nodes ----------------------------------------------------------------------------------


@graph_fact
def _written(graph: OpGraph) -> frozenset[int]:
    """Returns the variables of the model that some op of the step writes."""
    return frozenset(v.index for v in graph.variables if v.in_model and not v.read_only)


@graph_fact
def _touched(graph: OpGraph) -> list[set[int]]:
    """Returns the variables that each node uses, whether it reads them, writes them or only holds their handles."""
    found = [{*node.reads, *node.writes} for node in graph.nodes]
    for number, node in enumerate(graph.nodes):
        if node.op == VARIABLE and node.source is not None:
            for user in graph.consumers.get(Tensor(number, 0), ()):
                found[user].add(node.source)
    return found


def _members(graph: OpGraph) -> dict[int, None]:
    """Returns the forward nodes that belong to units, in order.

    They are the ops made in a model, the ops elsewhere that use a variable of the model which the step writes, and all
    that depend on one of these. A backward op that a model's forward op needs (a gradient taken inside `call`) counts
    as a forward op. An op outside a model belongs to no unit when it needs a gradient. Nor does one that needs a
    variable of the script's own which the step writes, such as a metric's: this variable lives on every rank.
    """
    fixed, written, touched = constants(graph), _written(graph), _touched(graph)
    own = {v.index for v in graph.variables if not v.in_model and not v.read_only}
    nodes = graph.nodes
    backward = {number for number, node in enumerate(nodes) if node.backward}
    inner: set[int] = set()
    for number in reversed(range(len(nodes))):
        if number in inner or (nodes[number].call != 0 and number not in backward):
            inner.update(backward.intersection(graph.data_from[number]))
    members: dict[int, None] = {}
    behind: set[int] = set()
    for number, node in enumerate(nodes):
        if node.op in SOURCES or number in fixed:
            continue
        needs = graph.data_from[number]
        outside = node.call == 0 and not (behind.isdisjoint(needs) and own.isdisjoint(touched[number]))
        if (node.backward and number not in inner) or outside:
            behind.add(number)
        elif (
            node.call != 0
            or number in inner
            or not members.keys().isdisjoint((*needs, *node.control))
            or touched[number] & written
        ):
            members[number] = None
    return members


def _after_model(graph: OpGraph, member: Collection[int]) -> frozenset[int]:
    """Returns the members outside every model that neither an op of a model nor a variable it writes needs."""
    needed: set[int] = set()
    written, touched = _written(graph), _touched(graph)
    for number in reversed(list(member)):
        node = graph.nodes[number]
        if node.call != 0 or number in needed or touched[number] & written:
            needed.add(number)
            needed.update(graph.data_from[number], node.control)
    return frozenset(n for n in member if n not in needed)


def _open_calls(graph: OpGraph) -> frozenset[int]:
    """Returns the calls whose own ops may be separated: models, layers that call layers, and what a model wraps."""
    children: dict[int, list[int]] = {}
    for call in graph.calls[1:]:
        children.setdefault(call.parent or 0, []).append(call.index)
    models = set(children.get(0, ()))
    wrapped = {children[m][0] for m in models if len(children.get(m, ())) == 1}
    return frozenset(models | wrapped | set(children)) - {0}


# --- raw units ------------------------------------------------------------------------------------


@graph_fact
def _call_stages(graph: OpGraph) -> list[int | None]:
    """Returns, for each call, the stage asked for by the innermost manual placement around it."""
    found: list[int | None] = []
    for call in graph.calls:
        around = None if call.parent is None else found[call.parent]
        found.append(around if call.stage is None else call.stage)
    return found


def _is_anchor(graph: OpGraph, number: int) -> bool:
    """Returns whether an op weighs enough to be a unit of its own."""
    node = graph.nodes[number]
    return node.op in _HEAVY_OPS or (bool(node.reads or node.writes) and node.op != "ReadVariableOp")


def _raw_units(
    graph: OpGraph, member: Collection[int], after: frozenset[int], open_calls: frozenset[int]
) -> list[list[int]]:
    """Cuts the order in which the members were made into runs.

    Args:
        graph: the step.
        member: forward nodes that belong to units, in order.
        after: those of them that come after the model.
        open_calls: calls whose own ops may be separated.

    Returns:
        Runs of nodes. An op that needs no other member, such as the read of a weight, is in the run of its first
        reader.
    """
    floats, stage_of = _floats(graph, member, after, open_calls), _call_stages(graph)
    order = [n for n in member if n not in after and n not in floats]
    pieces: list[list[int]] = []  # runs of one closed call, and single ops of open ones
    loose: list[bool] = []  # a single op too cheap to be a unit of its own
    keys: list[tuple[int | None, int | None]] = []
    for number in order:
        call = graph.nodes[number].call
        is_open = call == 0 or call in open_calls
        key = (None if is_open else call, stage_of[call])
        if pieces and not is_open and keys[-1] == key:
            pieces[-1].append(number)
            continue
        pieces.append([number])
        loose.append(is_open and not _is_anchor(graph, number))
        keys.append(key)
    runs = _joined(pieces, loose, [stage for _, stage in keys], _crossing(graph, pieces))
    if after:
        runs.append([n for n in member if n in after])
    run_of = {number: run for run in runs for number in run}
    for number in reversed(list(floats)):
        run = run_of[floats[number]]
        run.append(number)
        run_of[number] = run
    return [sorted(run) for run in runs]


def _floats(
    graph: OpGraph, member: Collection[int], after: frozenset[int], open_calls: frozenset[int]
) -> dict[int, int]:
    """Returns the ops of open calls that need no other member and have no effect, with their first reader."""
    free: set[int] = set()
    bound = set(member)
    written = _written(graph)
    for number in member:
        node = graph.nodes[number]
        if number in after or (node.call != 0 and node.call not in open_calls) or _is_anchor(graph, number):
            continue
        effect = node.writes or (node.stateful and node.op != "ReadVariableOp") or set(node.reads) & written
        if not effect and bound.isdisjoint((*graph.data_from[number], *node.control)):
            free.add(number)
            bound.remove(number)
    reader: dict[int, int] = {}
    for number in member:
        for before in graph.data_from[number]:
            if before in free:
                reader.setdefault(before, number)
    return {number: reader[number] for number in member if number in free and number in reader}


def _crossing(graph: OpGraph, pieces: list[list[int]]) -> list[int]:
    """Returns, for every i, the bytes of the forward tensors alive between piece i - 1 and piece i."""
    piece_of = {number: at for at, piece in enumerate(pieces) for number in piece}
    change = [0] * (len(pieces) + 2)
    for number, start in piece_of.items():
        for index, kind in enumerate(graph.nodes[number].outputs):
            readers = graph.consumers.get(Tensor(number, index), ())
            end = max([piece_of[r] for r in readers if r in piece_of], default=start)
            if end > start:
                # A cut where a tensor cannot be sent must not look cheap, since the contraction would undo it.
                weight = kind.nbytes() if kind.dtype not in UNSENDABLE_DTYPES else 1 << 60
                change[start + 1] += weight
                change[end + 1] -= weight
    alive, total = [], 0
    for delta in change[: len(pieces) + 1]:
        total += delta
        alive.append(total)
    return alive


def _joined(
    pieces: list[list[int]], loose: list[bool], stages: list[int | None], crossing: list[int]
) -> list[list[int]]:
    """Joins loose pieces to the heavy ones around them.

    Two heavy pieces are separated where the fewest bytes cross, late rather than early. Pieces for different stages are
    separated too. A loose piece without a stage goes with either neighbour.
    """
    if not pieces:
        return []
    cuts: set[int] = set()

    def part(left: int, right: int) -> None:
        cuts.add(min(range(left + 1, right + 1), key=lambda at: (crossing[at], -at)))

    settled = [at for at, is_loose in enumerate(loose) if not is_loose or stages[at] is not None]
    for left, right in pairwise(settled):
        if stages[left] != stages[right]:
            part(left, right)
    for left, right in pairwise(at for at, is_loose in enumerate(loose) if not is_loose):
        if not any(left < cut <= right for cut in cuts):
            part(left, right)
    bounds = [0, *sorted(cuts), len(pieces)]
    return [[n for piece in pieces[a:b] for n in piece] for a, b in pairwise(bounds)]


# --- contraction ----------------------------------------------------------------------------------


def _contracted(graph: OpGraph, raw: list[list[int]]) -> list[list[int]]:
    """Joins raw units that must be placed together."""
    unit_of = {number: at for at, nodes in enumerate(raw) for number in nodes}
    ties: nx.Graph = nx.Graph()
    ties.add_nodes_from(range(len(raw)))
    users: dict[int, list[int]] = {}
    written, touched = _written(graph), _touched(graph)
    for number, at in unit_of.items():
        for name in colocated_with(graph.nodes[number]):
            other = graph.number_of.get(name)
            if other in unit_of:
                ties.add_edge(at, unit_of[other])
        for tensor in graph.nodes[number].inputs:
            if tensor in graph.unsendable and tensor.node in unit_of:
                ties.add_edge(at, unit_of[tensor.node])
        for variable in touched[number] & written:
            users.setdefault(variable, []).append(at)
    for together in users.values():
        ties.add_edges_from((together[0], other) for other in together[1:])
    return [sorted(n for at in joined for n in raw[at]) for joined in sorted(nx.connected_components(ties), key=min)]


def _ordered(graph: OpGraph, groups: list[list[int]], after: frozenset[int]) -> list[tuple[int, ...]]:
    """Contracts cycles, and puts the groups in topological order, in the order they were made where there is choice."""
    acyclic = nx.condensation(dependences(graph, groups))
    nodes_of = {
        at: tuple(sorted(n for group in data["members"] for n in groups[group]))
        for at, data in acyclic.nodes(data=True)
    }

    def made(at: int) -> tuple[bool, int]:
        return bool(after.intersection(nodes_of[at])), nodes_of[at][0]

    return [nodes_of[at] for at in nx.lexicographical_topological_sort(acyclic, key=made)]


def dependences(graph: OpGraph, groups: Sequence[Sequence[int]]) -> nx.DiGraph:
    """Returns which groups of nodes need which, by position.

    Args:
        graph: one microbatch of a step.
        groups: groups of its nodes, such as units.

    Returns:
        A graph with an edge from each group to the groups that need something of it.
    """
    group_of = {number: at for at, nodes in enumerate(groups) for number in nodes}
    found: dict[tuple[int, int], None] = {}
    for number, at in group_of.items():
        for before in (*graph.data_from[number], *graph.nodes[number].control):
            if before in group_of and group_of[before] != at:
                found[group_of[before], at] = None
    edges: nx.DiGraph = nx.DiGraph()
    edges.add_nodes_from(range(len(groups)))
    edges.add_edges_from(found)
    return edges


def ordered_by_chunk(graph: OpGraph, units: Sequence[Unit], chunks: Sequence[int | None]) -> tuple[Unit, ...]:
    """Puts units whose chunk is known in the order of their chunks, as far as data flows that way.

        made:  k (0)   bias (1)   norm (0)          the bias needs nothing of the norm, nor the norm of the bias
        here:  k (0)   norm (0)   bias (1)

    A unit without a chunk goes with the one made before it, unless a unit that it needs comes later, or one that needs
    it comes earlier.

    Args:
        graph: one microbatch of the step.
        units: its units, in topological order.
        chunks: the chunk of each unit, or None.

    Returns:
        The units in another topological order, and their new positions.
    """
    needs = dependences(graph, [unit.nodes for unit in units])
    latest: dict[int, float] = {}
    for at in reversed(range(len(units))):
        asked = chunks[at]
        needed = min((latest[user] for user in needs.successors(at)), default=inf)
        latest[at] = needed if asked is None else asked
    reached: list[float] = []
    for at, asked in enumerate(chunks):
        before = max((reached[source] for source in (*needs.predecessors(at), *range(at)[-1:])), default=0)
        reached.append(min(before, latest[at]) if asked is None else asked)
    order = nx.lexicographical_topological_sort(needs, key=lambda at: (reached[at], at))
    return tuple(replace(units[at], index=index) for index, at in enumerate(order))


# --- what belongs to a unit -----------------------------------------------------------------------


def _backward_units(graph: OpGraph, unit_of: dict[int, int], fixed: frozenset[int], count: int) -> dict[int, int]:
    """Returns the unit of every backward node.

    It is the unit of the op that it differentiates, else that of its layer, else the one where its inputs are ready.

    Gradients flow towards the first unit, so an op that sums gradients of several units is ready in
    the earliest.
    """
    last_of_call: dict[int, int] = {}
    for number, unit in unit_of.items():
        call = graph.nodes[number].call
        if call != 0:
            last_of_call[call] = max(unit, last_of_call.get(call, 0))
    found: dict[int, int] = {}
    for number, node in enumerate(graph.nodes):
        if not node.backward or number in unit_of or number in fixed:
            continue
        if node.forward_of in unit_of:
            found[number] = unit_of[node.forward_of]
        elif node.call in last_of_call:
            found[number] = last_of_call[node.call]
        else:
            before = graph.data_from[number]
            gradients = [found[n] for n in before if n in found]
            kept = [unit_of[n] for n in before if n in unit_of]
            found[number] = min(gradients, default=max(kept, default=count - 1))
    return found


def _variables_used(graph: OpGraph, groups: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Returns the variables of the model that each group uses, directly or through a value made of weights."""
    derived, touched = weight_derived(graph), _touched(graph)
    used: list[tuple[int, ...]] = []
    for nodes in groups:
        found: set[int] = set()
        for number in nodes:
            if number not in derived:
                found |= touched[number]
            for before in graph.data_from[number]:
                found |= derived.get(before, frozenset())
        used.append(tuple(sorted(v for v in found if graph.variables[v].in_model)))
    return used


def _manual_stage(graph: OpGraph, nodes: Iterable[int], name: str) -> int | None:
    """Returns the stage that the script asked for. Units that are tied together must agree."""
    stage_of = _call_stages(graph)
    asked = {stage_of[graph.nodes[n].call] for n in nodes} - {None}
    if len(asked) > 1:
        raise PlacementError(
            f"The manual placements of {name!r} contradict each other: parts of it that share "
            f"state, and so must be "
            f"on one stage, were put on stages {sorted(s for s in asked if s is not None)}. "
            "Put them under one smp.partition(i)."
        )
    return next(iter(asked), None)


def _name(graph: OpGraph, nodes: tuple[int, ...], after: frozenset[int]) -> str:
    """Returns the paths of the innermost calls that a unit is made of, of three or more only the first and the last."""
    paths: dict[str, int] = {}
    for number in nodes:
        if number not in after:
            paths.setdefault(graph.calls[graph.nodes[number].call].path, number)
    if not paths:
        return AFTER_MODEL
    leaves = [p for p in paths if p and not any(q != p and q.startswith(p + "/") for q in paths)]
    if not leaves:
        leaves = ["step"]
    if len(leaves) > 2:
        return f"{leaves[0]} + … + {leaves[-1]} ({len(leaves)})"
    return " + ".join(leaves)


def _unique(names: Iterable[str]) -> list[str]:
    """Numbers the second and later units of one name."""
    seen: dict[str, int] = {}
    given = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        given.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return given
