"""Limits how many turns of a loop are under way at once, where the turns wait for each other.

TensorFlow begins up to `parallel_iterations` turns of a loop before the first of them is done. In Keras's recurrent
layers this number is 32. Where every turn needs a product of the turn before, this saves no time. But it costs memory:
an op that only a sum waits for is put off, and its inputs and outputs are kept for all turns that have begun:

    turn 0   dh ──┬─ MatMul ──▶ dh'                                the gradient of a kernel, as large as the kernel,
                  └─ MatMul ──▶ dW ──▶ sum                         once for every turn under way
    turn 1         dh' ─┬─ MatMul ──▶ dh''
                        └─ MatMul ──▶ dW ──▶ sum

The turns of `tf.map_fn` do not wait for each other. Many threads can work on them, so their number stays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import networkx as nx

from smp_tf.partition.graph.node_def import MAX_DEPTH, attributes, bodies, function_names, functions, in_order
from smp_tf.partition.graph.op_graph import Node, OpGraph
from smp_tf.partition.graph.op_kinds import FUNCTION_OPS, LOOP_OPS, MATRIX_OPS

#: How many turns of such a loop may be under way: the first, and the next one's ops that wait for nothing.
FEW = 2
_AT_ONCE = "parallel_iterations"
#: The attribute that joins functions which do the same on different devices. TensorFlow replaces one by another.
_ALIKE = "api_implements"
_NEW = "_few_turns"
#: TensorFlow's own number.
_DEFAULT = 10


def turns_at_once(node: Node) -> int:
    """Returns how many turns of a loop may be under way.

    Args:
        node: a node among `LOOP_OPS`.
    """
    attrs = attributes(node)
    return int(attrs[_AT_ONCE].i) if _AT_ONCE in attrs else _DEFAULT


def with_few_turns(graph: OpGraph) -> OpGraph:
    """Returns the graph with at most `FEW` turns under way in loops whose turns wait for each other.

    Args:
        graph: the op graph.

    Returns:
        The graph as it was, or one whose library has the changed functions under new names. The old names still mean
        the old functions to TensorFlow.
    """
    if _AT_ONCE.encode() not in graph.library and LOOP_OPS.isdisjoint(graph.op_types):
        return graph
    loops = _Loops(functions(graph.library))
    new_names = {name: f"{name}{_NEW}" for name in loops.functions_that_change()}

    def changes(node: Node) -> bool:
        # A dataset, or a call on another device, names functions too.
        attrs = attributes(node)
        return loops.is_to_change(node.op, attrs) or not new_names.keys().isdisjoint(function_names(attrs))

    nodes = tuple(
        dataclasses.replace(node, definition=_written(loops, node.definition, new_names)) if changes(node) else node
        for node in graph.nodes
    )
    return dataclasses.replace(graph, nodes=nodes, library=_library(loops, graph.library, new_names))


class _Loops:
    """Tells which loops of a library are to have few turns under way.

    Args:
        library: functions by name.
    """

    def __init__(self, library: Mapping[str, Any]) -> None:
        self._library = library
        self._waits: dict[str, bool] = {}
        self._products: dict[str, bool] = {}

    def is_to_change(self, op: str, attrs: Any) -> bool:
        """Returns whether a node is a loop with more turns under way than it is to have."""
        if op not in LOOP_OPS or _AT_ONCE not in attrs or attrs[_AT_ONCE].i <= FEW:
            return False
        body = bodies(attrs)[0]
        if body not in self._waits:
            self._waits[body] = self._turns_wait(body)
        return self._waits[body]

    def functions_that_change(self) -> set[str]:
        """Returns the functions with such a loop, those that refer to such a function, or may replace one."""
        changed = {
            name
            for name, function in self._library.items()
            if any(self.is_to_change(node.op, node.attr) for node in function.node_def)
        }
        refers = {
            name: {*function_names(function.attr), *(n for d in function.node_def for n in function_names(d.attr))}
            for name, function in self._library.items()
        }
        alike: dict[bytes, set[str]] = {}
        for name, function in self._library.items():
            if _ALIKE in function.attr:
                alike.setdefault(function.attr[_ALIKE].s, set()).add(name)
        for names in alike.values():
            for name in names:
                refers[name] |= names
        while more := {name for name, to in refers.items() if name not in changed and not changed.isdisjoint(to)}:
            changed |= more
        return changed

    def _turns_wait(self, body: str) -> bool:
        """Returns whether a product of one turn is needed for a product of the next."""
        function = self._library.get(body)
        if function is None:
            return False
        arguments = [argument.name for argument in function.signature.input_arg]
        # For each value: the arguments that it is made of, and whether by a product.
        made: dict[str, dict[int, bool]] = {name: {index: False} for index, name in enumerate(arguments)}
        for node in in_order(function):
            of: dict[int, bool] = {}
            by_product = self._is_product(node.op, node.attr, 0)
            for reference in node.input:
                if not reference.startswith("^"):
                    for argument, through in made[reference.partition(":")[0]].items():
                        of[argument] = of.get(argument, False) or through or by_product
            made[node.name] = of
        turns = nx.DiGraph()
        products = []
        for index, output in enumerate(function.signature.output_arg):
            for argument, through in made[function.ret[output.name].partition(":")[0]].items():
                turns.add_edge(argument, index)
                if through:
                    products.append((argument, index))
        among = {at: number for number, found in enumerate(nx.strongly_connected_components(turns)) for at in found}
        return any(among[argument] == among[index] for argument, index in products)

    def _is_product(self, op: str, attrs: Any, depth: int) -> bool:
        """Returns whether an op is a matrix product or a convolution, or calls a function that has one."""
        if op in MATRIX_OPS:
            return True
        if op not in FUNCTION_OPS or depth > MAX_DEPTH:
            return False
        return any(self._has_product(name, depth + 1) for name in bodies(attrs))

    def _has_product(self, name: str, depth: int) -> bool:
        if name not in self._products:
            function = self._library.get(name)
            found = function is not None and any(
                self._is_product(node.op, node.attr, depth) for node in function.node_def
            )
            self._products[name] = found
        return self._products[name]


def _written(loops: _Loops, definition: bytes, new_names: Mapping[str, str]) -> bytes:
    """Returns a node's definition, in which the functions that it calls have their new names."""
    from tensorflow.core.framework import node_def_pb2

    node = node_def_pb2.NodeDef.FromString(definition)
    _change(loops, node, new_names)
    return bytes(node.SerializeToString(deterministic=True))


def _library(loops: _Loops, library: bytes, new_names: Mapping[str, str]) -> bytes:
    """Returns the library with the changed functions in place of the old ones."""
    if not new_names:
        return library
    from tensorflow.core.framework import function_pb2

    changed = function_pb2.FunctionDefLibrary.FromString(library)
    for function in changed.function:
        if function.signature.name in new_names:
            function.signature.name = new_names[function.signature.name]
            for node in function.node_def:
                _change(loops, node, new_names)
            _rename(function.attr, new_names)
            if _ALIKE in function.attr:
                function.attr[_ALIKE].s += _NEW.encode()
    return bytes(changed.SerializeToString(deterministic=True))


def _change(loops: _Loops, node: Any, new_names: Mapping[str, str]) -> None:
    if loops.is_to_change(node.op, node.attr):
        node.attr[_AT_ONCE].i = FEW
    _rename(node.attr, new_names)


def _rename(attrs: Any, new_names: Mapping[str, str]) -> None:
    """Puts the new names of functions into attributes."""
    for attribute in attrs.values():
        if attribute.HasField("func"):
            attribute.func.name = new_names.get(attribute.func.name, attribute.func.name)
        for function in attribute.list.func:
            function.name = new_names.get(function.name, function.name)
        if attribute.HasField("s") and attribute.s.isascii():
            attribute.s = new_names.get(attribute.s.decode(), attribute.s.decode()).encode()
