"""Finds what loops keep for their gradients: lists with an entry per turn. Several lists may share memory.

    While(i, h, x, list a, list b) ──▶ i, h, x, a, b        the body of an LSTM
        x_t = TensorListGetItem(x, i)
        h'  = tanh(x_t, h)
        a'  = TensorListPushBack(a, h')                      memory of its own, as many entries as the loop has trips
        b'  = TensorListPushBack(b, h)                       what `a` got the time before: no memory of its own
        c'  = TensorListPushBack(c, x_t)                     entries of `x`

TensorFlow knows the type of the entries, and `function_cost` knows how often a loop runs. Memory that several lists
share is counted once, at the list that is read last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

from smp_tf.partition.graph.node_def import MAX_DEPTH, attributes, bodies, functions, in_order
from smp_tf.partition.graph.op_graph import ARGUMENT, Node, OpGraph, Tensor
from smp_tf.partition.graph.op_kinds import CALL_OPS, FUNCTION_OPS, LOOP_OPS, NO_MEMORY_OPS, SAME_MEMORY_OPS
from smp_tf.partition.op_cost.function_cost import ASSUMED_TRIPS, loop_trips

#: The name of memory that exists anyway, such as that of a variable which every turn reads.
_NOTHING = "nothing"


def with_list_lengths(graph: OpGraph, assumed: int = ASSUMED_TRIPS) -> OpGraph:
    """Returns the graph with the number of entries of each list that its loops and functions give.

    Args:
        graph: the op graph, whose lists have the types of their entries.
        assumed: how often a loop runs where nothing says it.

    Returns:
        The same graph where there are no lists. A list whose entries are in another list's memory counts none.
    """
    if not any([kind.entry for node in graph.nodes for kind in node.outputs]):
        return graph
    trips = loop_trips(graph)
    memory = _memory_of_lists(graph)
    last_read = {tensor: readers[-1] for tensor, readers in graph.consumers.items()}
    # For each memory, the list at which it is counted.
    counted: dict[Hashable, Tensor | None] = {_NOTHING: None}
    for tensor, token in memory.items():
        other = counted.setdefault(token, tensor)
        if other is None:
            continue
        # A list that backward only reads belongs to forward. A list that a function is given belongs to its caller.
        of = graph.nodes[other.node]
        if of.op == ARGUMENT or graph.nodes[tensor.node].backward != of.backward:
            continue
        if last_read.get(tensor, -1) > last_read.get(other, -1):
            counted[token] = tensor

    def filled(number: int, node: Node) -> Node:
        if node.op == "TensorListFromTensor":
            entries = (graph.type_of(node.inputs[0]).shape or (None,))[0] or 0
        elif node.op in FUNCTION_OPS:
            entries = trips.get(number, assumed)
        else:
            return node
        outputs = list(node.outputs)
        for index, kind in enumerate(outputs):
            tensor = Tensor(number, index)
            if kind.entry and counted[memory[tensor]] == tensor:
                outputs[index] = dataclasses.replace(kind, entries=entries)
        return dataclasses.replace(node, outputs=tuple(outputs))

    return dataclasses.replace(graph, nodes=tuple(filled(*item) for item in enumerate(graph.nodes)))


def _memory_of_lists(graph: OpGraph) -> dict[Tensor, Hashable]:
    """Returns, for each list, a name for the memory in which its entries lie."""
    library = functions(graph.library)
    memory: dict[Tensor, Hashable] = {}
    for number, node in enumerate(graph.nodes):
        given = [memory.get(tensor, tensor) for tensor in node.inputs]
        made: Sequence[Hashable] = ()
        if node.op in LOOP_OPS | CALL_OPS and node.definition:
            made = _called(library, node.op, attributes(node), given, (number,))
        elif node.op in SAME_MEMORY_OPS:
            made = given
        for index, kind in enumerate(node.outputs):
            if kind.entry:
                tensor = Tensor(number, index)
                memory[tensor] = made[index] if index < len(made) else tensor
    return memory


@dataclasses.dataclass(frozen=True)
class _Argument:
    """What the body of a loop is given at a position, anew in every turn."""

    position: int


@dataclasses.dataclass(frozen=True)
class _EntryOf:
    """A tensor taken out of a list."""

    list: Hashable


@dataclasses.dataclass(frozen=True)
class _Extended:
    """A list to which an entry was added."""

    list: Hashable
    entry: Hashable


def _called(
    library: dict[str, Any], op: str, attrs: Any, given: Sequence[Hashable], path: tuple[Hashable, ...]
) -> list[Hashable]:
    """Returns names for the memory of the results of a loop or a function, from the names of its arguments."""
    function = library.get(bodies(attrs)[0])
    if function is None or len(path) > MAX_DEPTH:
        return []
    if op in CALL_OPS:
        return _results(library, function, given, path)
    arguments = [_Argument(position) for position in range(len(given))]
    body = _results(library, function, arguments, path)
    return [_after_loop(position, body, given, path) for position in range(len(body))]


def _after_loop(
    position: int, body: Sequence[Hashable], given: Sequence[Hashable], path: tuple[Hashable, ...]
) -> Hashable:
    """Returns the name of a loop's result at a position, from what its body gives."""
    made = body[position]
    if made == _Argument(position):
        return given[position]
    if not isinstance(made, _Extended):
        return (path, position)
    entry = made.entry
    if isinstance(entry, _EntryOf) and isinstance(entry.list, _Argument) and body[entry.list.position] == entry.list:
        return given[entry.list.position]
    if isinstance(entry, _Argument):
        # The body is given what it gave in the turn before, or always the same.
        entry = _NOTHING if body[entry.position] == entry else body[entry.position]
    return _NOTHING if entry == _NOTHING else (path, entry)


def _results(
    library: dict[str, Any], function: Any, given: Sequence[Hashable], path: tuple[Hashable, ...]
) -> list[Hashable]:
    """Returns the names for the memory of a function's results."""
    known: dict[str, Hashable] = {
        argument.name: name for argument, name in zip(function.signature.input_arg, given, strict=False)
    }
    for node in in_order(function):
        read = [known.get(name, (path, name)) for name in node.input if not name.startswith("^")]
        if node.op in LOOP_OPS | CALL_OPS:
            made = _called(library, node.op, node.attr, read, (*path, node.name))
            known |= {f"{node.name}:output:{index}": name for index, name in enumerate(made)}
        elif node.op in SAME_MEMORY_OPS:
            known |= {f"{node.name}:output:{index}": name for index, name in enumerate(read)}
        elif node.op in NO_MEMORY_OPS:
            known |= {f"{node.name}:{output}:0": _NOTHING for output in ("value", "output")}
        elif node.op == "TensorListPopBack":
            known[f"{node.name}:output_handle:0"] = read[0]
        elif node.op == "TensorListGetItem":
            known[f"{node.name}:item:0"] = _EntryOf(read[0])
        elif node.op in ("TensorListSetItem", "TensorListPushBack"):
            known[f"{node.name}:output_handle:0"] = _Extended(read[0], read[-1])
    results = (function.ret[result.name] for result in function.signature.output_arg)
    return [known.get(name, (path, name)) for name in results]
