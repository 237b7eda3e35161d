"""Results of a call or a loop that are its arguments, unchanged: other names for memory that exists already.

A recurrent layer's loop hands its kernels on from turn to turn. The layer's function gives them to its gradient,
together with what the loop has made:

    kernel ──▶ function( While(..., kernel) ) ──▶ output 7        the memory of the kernel, and not a stash
"""

from __future__ import annotations

from typing import Any

from smp_tf.partition.graph.graph_caches import graph_cache
from smp_tf.partition.graph.graph_facts import graph_fact
from smp_tf.partition.graph.node_def import MAX_DEPTH, attributes, bodies, functions
from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.graph.op_kinds import CALL_OPS, LOOP_OPS, SAME_MEMORY_OPS

_PASSING_OPS = CALL_OPS | LOOP_OPS


@graph_fact
def passed_through(graph: OpGraph) -> dict[int, dict[int, int]]:
    """Returns the outputs of nodes that are inputs of theirs, unchanged.

    Args:
        graph: the nodes, and the functions that they call.

    Returns:
        By number of a node that calls a function, the number of the input by number of the output.
    """
    return {
        number: _of_call(graph.library, node.op, attributes(node), 0)
        for number, node in enumerate(graph.nodes)
        if node.op in _PASSING_OPS and node.definition
    }


def _of_call(library: bytes, op: str, attrs: Any, depth: int) -> dict[int, int]:
    found = _of_function(library, bodies(attrs)[0], depth)
    if op in CALL_OPS:
        return found
    # These are what every turn passes on unchanged. A loop's body has the arguments of the loop, in their order.
    return {output: argument for output, argument in found.items() if output == argument}


@graph_cache(1024)
def _of_function(library: bytes, name: str, depth: int) -> dict[int, int]:
    function = functions(library).get(name)
    # XLA copies what it passes through.
    if function is None or depth > MAX_DEPTH or function.attr["_XlaMustCompile"].b:
        return {}
    arguments = {argument.name: index for index, argument in enumerate(function.signature.input_arg)}
    nodes = {node.name: node for node in function.node_def}

    def argument_behind(reference: str) -> int | None:
        """Returns the argument that a reference, "argument" or "node:output:index", stands for, or None."""
        while reference not in arguments:
            of, _, place = reference.partition(":")
            node, index = nodes.get(of), int(place.rpartition(":")[2] or 0)
            if node is None:
                return None
            if node.op in SAME_MEMORY_OPS:
                source: int | None = index
            elif node.op in _PASSING_OPS:
                source = _of_call(library, node.op, node.attr, depth + 1).get(index)
            else:
                source = None
            if source is None:
                return None
            reference = node.input[source]
        return arguments[reference]

    found = {}
    for index, output in enumerate(function.signature.output_arg):
        argument = argument_behind(function.ret[output.name])
        if argument is not None:
            found[index] = argument
    return found
