"""Divides the backward ops of a unit, or stage, into those that others wait for and those that only weights need.

    gradient from above ──┬─▶ ReluGrad ──┬─▶ MatMul(·, kernelᵀ) ─▶ gradient to below      input gradient
                          │              └─▶ MatMul(xᵀ, ·) ──────▶ kernel's gradient      weight gradient

An op that both need, such as the ReluGrad, is a part of the input gradient, since the units below wait for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from smp_tf.partition.graph.op_graph import OpGraph, Tensor


def input_gradient_nodes(
    graph: OpGraph, backward_unit: Mapping[int, int], sums: Collection[int] = (), returned: Collection[int] = ()
) -> frozenset[int]:
    """Returns the backward ops that lead to the gradient of a unit's inputs.

    Args:
        graph: one microbatch of the step.
        backward_unit: unit, or stage, of every backward node, by its number.
        sums: nodes that put the gradient of a variable together. Their inputs are no gradients of a unit's inputs.
        returned: nodes that a step output waits for although no unit reads them.

    Returns:
        Their numbers. All other nodes of `backward_unit` only make gradients of weights.
    """
    found: set[int] = set()
    for number in sorted(backward_unit, reverse=True):
        node = graph.nodes[number]
        if number in sums:
            continue
        readers = {r for index in range(len(node.outputs)) for r in graph.consumers.get(Tensor(number, index), ())}
        leaves = number in returned or any(
            r in backward_unit and r not in sums and backward_unit[r] != backward_unit[number] for r in readers
        )
        if leaves or readers & found:
            found.add(number)
    return frozenset(found)
