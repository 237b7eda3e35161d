"""Lets gradients depend on variables of the script that the step writes, such as a counter or a weight of a loss.

    n.assign_add(0.1)                           n ──▶ + 0.1 ─┬─▶ loss ──▶ gradients
    loss = error + n * penalty         ──▶                   └─▶ assigned to n

Such a variable lives on every rank, and what reads it after the step has written it runs on all of them. A gradient
belongs to one rank. So what it depends on takes the value that is written, in place of reading it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tensorflow.core.framework import node_def_pb2

from smp_tf.partition.graph.graph_editor import GraphEditor
from smp_tf.partition.graph.node_def import attributes
from smp_tf.partition.graph.op_graph import VARIABLE, Node, OpGraph, Tensor, TensorType
from smp_tf.partition.graph.order_of_writes import last_write_before

#: Ops that write a value, with the op that makes the value of what was there; "" where it is an input.
_WRITTEN = {"AssignVariableOp": "", "AssignAddVariableOp": "AddV2", "AssignSubVariableOp": "Sub"}


def as_values(graph: OpGraph) -> OpGraph:
    """Returns a step whose gradients take what was written to variables of the script, and do not read it again.

    Args:
        graph: the op graph of a step, as traced. It is returned as it is where there is nothing to do.
    """
    if not graph.written_states:
        return graph
    needed, last = set[int](), dict[int, int]()
    stack = [tensor.node for gradient in graph.gradients for tensor in gradient.tensors]
    while stack:
        number = stack.pop()
        if number in needed:
            continue
        needed.add(number)
        node = graph.nodes[number]
        stack.extend(graph.data_from[number])
        for variable in _states_of(graph, node):
            write = last_write_before(graph, number, variable)
            if node.op == "ReadVariableOp" and write is not None and _is_known(graph, write, variable):
                last[number] = write
                stack.extend(graph.nodes[one].inputs[1].node for one in (write, *_chain(graph, write)))
    return _Rebuilt(graph, needed, last).graph if last else graph


def read_before(graph: OpGraph) -> tuple[OpGraph, tuple[int, ...]]:
    """Returns a step of one microbatch whose gradients read variables of the script as they are before the step.

    Args:
        graph: the op graph of a step that `as_values` has given.

    Returns:
        The graph, in which such a variable stands twice: as one that is only read, too. And, for each variable that was
        added, the index of the one that it is.
    """
    needed, added = _before_gradients(graph), dict[int, int]()
    early: dict[int, int] = {}
    for number in sorted(needed):
        node = graph.nodes[number]
        for variable in _states_of(graph, node):
            if node.op == "ReadVariableOp" and last_write_before(graph, number, variable) is None:
                early[number] = added.setdefault(variable, len(graph.variables) + len(added))
    if not early:
        return graph, ()
    more = tuple(
        dataclasses.replace(
            graph.variables[old], index=new, name=f"{graph.variables[old].name} before the step", read_only=True
        )
        for old, new in added.items()
    )
    editor = GraphEditor(dataclasses.replace(graph, variables=graph.variables + more))
    handles: dict[int, Tensor] = {}
    for number, node in enumerate(graph.nodes):
        kept = editor.moved_node(number)
        if number in early:
            kept = dataclasses.replace(kept, inputs=(handles[early[number]],), reads=(early[number],))
        editor.keep(number, kept)
        if node.op == VARIABLE and node.source in added:
            index = added[node.source]
            handles[index] = editor.add(dataclasses.replace(kept, name=f"{node.name}/before", source=index))
    return editor.finish(), tuple(added)


def state_of_gradients(graph: OpGraph) -> str | None:
    """Returns the name of a variable of the script that the step writes and its gradients depend on; None for none.

    Args:
        graph: the op graph of a step.
    """
    returned = set(graph.outputs)
    for number in sorted(_before_gradients(graph, returned)):
        for variable in _states_of(graph, graph.nodes[number]):
            return graph.variables[variable].name
    return None


class _Rebuilt:
    """Writes a graph in which values that are written are there as tensors.

    Args:
        graph: the old graph.
        needed: the nodes that gradients depend on.
        last: by node that reads a variable, the one that has written it last.
    """

    def __init__(self, graph: OpGraph, needed: set[int], last: Mapping[int, int]) -> None:
        self._old = graph
        self._needed = needed
        self._last = last
        self._editor = GraphEditor(graph)
        self._values: dict[int, Tensor] = {}
        self._writes = set(last.values())
        for write in sorted(self._writes, reverse=True):
            self._writes |= _chain(graph, write)
        for number in range(len(graph.nodes)):
            self._keep(number)
        self.graph = self._editor.finish()

    def _keep(self, number: int) -> None:
        old = self._old.nodes[number]
        kept = self._editor.moved_node(number)
        if number in self._needed:
            inputs = [
                self._values[self._last[before.node]] if before.node in self._last else moved
                for before, moved in zip(old.inputs, kept.inputs, strict=True)
            ]
            kept = dataclasses.replace(kept, inputs=tuple(inputs))
        if number not in self._writes:
            self._editor.keep(number, kept)
            return
        combined = _WRITTEN[old.op]
        if not combined:
            self._editor.keep(number, kept)
            self._values[number] = kept.inputs[1]
            return
        [variable] = old.writes
        kind = self._old.variables[variable].type
        write = last_write_before(self._old, number, variable)
        if write is None:
            read = _op(old, f"{old.name}/before", "ReadVariableOp", (kept.inputs[0],), kind)
            before = self._editor.add(dataclasses.replace(read, reads=(variable,)))
            kept = dataclasses.replace(kept, control=(*kept.control, before.node))
        else:
            before = self._values[write]
        self._editor.keep(number, kept)
        self._values[number] = self._editor.add(_op(old, f"{old.name}/value", combined, (before, kept.inputs[1]), kind))


def _op(write: Node, name: str, op: str, inputs: tuple[Tensor, ...], kind: TensorType) -> Node:
    """Returns a node that computes what a write gives, in the layer call of that write."""
    definition = node_def_pb2.NodeDef(name=name, op=op)
    definition.attr["dtype" if op == "ReadVariableOp" else "T"].type = attributes(write)["dtype"].type
    return Node(name, op, inputs, (), (kind,), definition.SerializeToString(deterministic=True), write.call)


def _chain(graph: OpGraph, write: int) -> set[int]:
    """Returns the writes that the value after a write is made of, besides itself."""
    found: set[int] = set()
    while _WRITTEN[graph.nodes[write].op]:
        [variable] = graph.nodes[write].writes
        before = last_write_before(graph, write, variable)
        if before is None:
            break
        found.add(before)
        write = before
    return found


def _is_known(graph: OpGraph, write: int, variable: int) -> bool:
    """Returns whether it is known which value a variable has after a write."""
    node = graph.nodes[write]
    if node.op not in _WRITTEN or node.writes != (variable,):
        return False
    if not _WRITTEN[node.op]:
        return True
    before = last_write_before(graph, write, variable)
    return before is None or _is_known(graph, before, variable)


def _states_of(graph: OpGraph, node: Node) -> list[int]:
    """Returns the variables of the script, among those that a node reads, that the step writes."""
    if not node.reads:
        return []
    variables = [graph.variables[index] for index in node.reads]
    return [v.index for v in variables if not v.in_model and not v.read_only]


def _before_gradients(graph: OpGraph, among: set[Tensor] | None = None) -> set[int]:
    """Returns the nodes from which data flow into gradients of weights, of all or of those among some tensors."""
    tensors = [tensor for gradient in graph.gradients for tensor in gradient.tensors]
    return graph.ancestors((t.node for t in tensors if among is None or t in among), control=False)
