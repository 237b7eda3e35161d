"""Results of a call or a loop that are its arguments, as they came: another name for memory that is there.

A recurrent layer's loop hands its kernels on from one turn to the next, and the layer's function gives them to its
gradient, besides what the loop has made:

    kernel ──▶ function( While(..., kernel) ) ──▶ output 7        the memory of the kernel, and not a stash
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from smp_tf.partition.graph.node_def import MAX_DEPTH, attributes, bodies, functions
from smp_tf.partition.graph.op_graph import Node
from smp_tf.partition.graph.op_kinds import CALL_OPS, LOOP_OPS, SAME_MEMORY_OPS


def passed_through(library: bytes, node: Node) -> dict[int, int]:
    """Returns the outputs of a node that are inputs of it.

    Args:
        library: the functions of its graph, serialised.
        node: any node.

    Returns:
        By number of the output, the number of the input; empty for what calls no function.
    """
    if node.op not in CALL_OPS | LOOP_OPS or not node.definition:
        return {}
    return _of_call(library, node.op, attributes(node), 0)


def _of_call(library: bytes, op: str, attrs: Any, depth: int) -> dict[int, int]:
    found = _of_function(library, bodies(attrs)[0], depth)
    if op in CALL_OPS:
        return found
    # What every turn passes on as it came. The arguments of a loop's body are those of the loop, in their order.
    return {output: argument for output, argument in found.items() if output == argument}


@lru_cache(maxsize=1024)
def _of_function(library: bytes, name: str, depth: int) -> dict[int, int]:
    function = functions(library).get(name)
    if function is None or depth > MAX_DEPTH:
        return {}
    arguments = {argument.name: index for index, argument in enumerate(function.signature.input_arg)}
    nodes = {node.name: node for node in function.node_def}

    def argument_behind(reference: str) -> int | None:
        """Returns the argument that a reference is, "argument" or "node:output:index", or None."""
        while reference not in arguments:
            of, _, place = reference.partition(":")
            node, index = nodes.get(of), int(place.rpartition(":")[2] or 0)
            if node is None:
                return None
            if node.op in SAME_MEMORY_OPS:
                source: int | None = index
            elif node.op in CALL_OPS | LOOP_OPS:
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
