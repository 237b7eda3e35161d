"""Keeps what a function says of an op graph with the graph, so that it is found out once.

An op graph never changes, and planning asks the same of it again and again: which nodes are constants, what each costs,
what its units are. An answer goes with its graph. A graph that a pass makes of another one begins without answers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

from smp_tf.partition.graph.op_graph import OpGraph

Function = TypeVar("Function", bound=Callable[..., Any])


def graph_fact(function: Function) -> Function:
    """Keeps a function's results with the graphs that it is called with.

    Args:
        function: takes a graph, and perhaps more that can be hashed, in their order. Nobody may change what it returns.

    Example:
        >>> @graph_fact
        ... def count(graph: OpGraph, op: str) -> int:
        ...     return sum(node.op == op for node in graph.nodes)
        >>> count(graph, "MatMul")
        3
    """

    @functools.wraps(function)
    def kept(graph: OpGraph, *more: Hashable) -> Any:
        question = function, *more
        if question not in graph.facts:
            graph.facts[question] = function(graph, *more)
        return graph.facts[question]

    return cast(Function, kept)
