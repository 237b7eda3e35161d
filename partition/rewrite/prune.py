"""A step without what nobody needs."""

from __future__ import annotations

from collections.abc import Collection

from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.units.units import weight_derived


def prune(graph: OpGraph) -> OpGraph:
    """Returns the graph without ops that no output, no effect and no placement of a trained weight needs.

    Args:
        graph: the op graph of a step.
    """
    wanted = [t.node for t in graph.outputs] + [n for n, node in enumerate(graph.nodes) if node.stateful]
    wanted += _only_uses_of_trained(graph, graph.ancestors(wanted))
    return graph.subgraph(graph.ancestors(wanted))


def _only_uses_of_trained(graph: OpGraph, needed: Collection[int]) -> list[int]:
    """Returns forward ops that use a weight whose gradient is needed, where none of them is needed itself.

    The gradient of a linear layer needs nothing of the layer's forward pass, but who stores the weight is decided by
    what uses it. TensorFlow leaves such ops out of the segments, in which nothing reads them.
    """
    trained = {g.variable for g in graph.gradients if all(t.node in needed for t in g.tensors)}
    trained &= {v.index for v in graph.variables if v.in_model}
    if not trained:
        return []
    derived = weight_derived(graph)
    uses: dict[int, list[int]] = {}
    for number, node in enumerate(graph.nodes):
        if node.call == 0 or node.backward or number in derived:
            continue
        of_inputs = (derived.get(t.node, frozenset()) for t in node.inputs)
        for variable in trained.intersection({*node.reads}.union(*of_inputs)):
            uses.setdefault(variable, []).append(number)
    return [number for users in uses.values() if not any(n in needed for n in users) for number in users]
