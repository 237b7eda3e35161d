"""Divides the backward ops of a unit, or stage, into those that others wait for and those that only weights need.

    gradient from above ──┬─▶ ReluGrad ──┬─▶ MatMul(·, kernelᵀ) ─▶ gradient to below      input gradient
                          │              └─▶ MatMul(xᵀ, ·) ──────▶ kernel's gradient      weight gradient

An op that both need, such as the ReluGrad, is a part of the input gradient, since the units below wait for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from smp_tf.partition.graph.op_graph import OpGraph


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
        if number in sums:
            continue
        readers, own = graph.data_to[number], backward_unit[number]
        leaves = [r for r in readers if backward_unit.get(r, own) != own and r not in sums]
        if number in returned or leaves or not found.isdisjoint(readers):
            found.add(number)
    return frozenset(found)
