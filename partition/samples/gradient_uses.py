"""Finds uses of gradients whose result for microbatches differs from the result for the whole batch.

The gradient of a batch is the average of its microbatches' gradients. So a result made of gradients may be averaged
over the microbatches only where it is *linear* in them:

    gradient * 0.5, gradient + decay * weight, gradient - mean(gradient)     the average is that of the batch
    gradient / norm(gradients), gradient ** 2, clip(gradient)                the average is something else
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from smp_tf.partition.graph.graph_facts import graph_fact
from smp_tf.partition.graph.op_graph import ARGUMENT, Node, OpGraph, Tensor
from smp_tf.partition.graph.op_kinds import named

#: Ops that are linear in all of their data inputs together.
_LINEAR = named(
    """
    Add AddN AddV2 BroadcastTo Cast CheckNumerics ConcatV2 Conj ConjugateTranspose Cumsum EnsureShape ExpandDims
    GatherNd GatherV2 Identity IdentityN Imag MatrixBandPart MatrixDiagPartV3 MatrixDiagV3 Mean Neg Pack Pad
    PreventGradient Real Reshape Reverse ReverseV2 Roll Slice Snapshot Split SplitV Squeeze StopGradient StridedSlice
    Sub Sum Tile Transpose Unpack UnsortedSegmentSum
    """
)
#: Ops that are linear in each of their inputs, where the others do not depend on the samples.
_BILINEAR = named(
    """
    BatchMatMul BatchMatMulV2 BatchMatMulV3 Conv2D DepthwiseConv2dNative Einsum MatMul Mul MulNoNan
    """
)
#: Ops that are linear in their first input, where the second does not depend on the samples.
_QUOTIENTS = frozenset({"RealDiv", "Div", "DivNoNan"})
#: Ops that choose among their other inputs by the first.
_CHOICES = frozenset({"Select", "SelectV2"})
#: Ops that test whether gradients are finite, and their consumers. Where all are finite, the result is always the same.
_FINITE = named("IsFinite IsInf IsNan")
_OF_FINITE = named("All Any Identity LogicalAnd LogicalNot LogicalOr")
#: Ops that only read the type and shape of their inputs.
_SHAPES = frozenset({"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike", "BroadcastGradientArgs"})


@dataclass(frozen=True, slots=True)
class NonlinearUse:
    """A use of gradients that is not linear, and the result that it leads to.

    Args:
        op: name of the op.
        kind: type of the op.
        position: the output of the step that it leads to; None for a variable of the script's.
        variable: the variable that it leads to; None for an output.
    """

    op: str
    kind: str
    position: int | None
    variable: str | None


@graph_fact
def nonlinear_uses(graph: OpGraph) -> tuple[NonlinearUse, ...]:
    """Finds the results and writes of a step that are not linear in its gradients.

    Args:
        graph: a step, traced for a microbatch.

    Returns:
        For each such output or variable of the script, the op where it stops being linear.
    """
    on_samples = _reached(graph, (n for n, node in enumerate(graph.nodes) if node.op == ARGUMENT))
    linear = {tensor for gradient in graph.gradients for tensor in gradient.tensors[:1]}
    stops: dict[Tensor, int] = {}
    finite: set[Tensor] = set()
    for number, node in enumerate(graph.nodes):
        # Backward computes other gradients from a gradient. That is no use of it.
        if node.backward or node.op in _SHAPES:
            continue
        if node.op in _FINITE or (node.op in _OF_FINITE and not finite.isdisjoint(node.inputs)):
            finite.update(graph.tensors_of(number))
        elif not stops.keys().isdisjoint(node.inputs):
            broken = next(stops[t] for t in node.inputs if t in stops)
            stops.update(dict.fromkeys(graph.tensors_of(number), broken))
        elif not linear.isdisjoint(node.inputs):
            if _is_linear(graph, node, linear, finite, on_samples):
                linear.update(graph.tensors_of(number))
            else:
                stops.update(dict.fromkeys(graph.tensors_of(number), number))
    uses = [
        NonlinearUse(graph.nodes[stops[t]].name, graph.nodes[stops[t]].op, position, None)
        for position, t in enumerate(graph.outputs)
        if t in stops
    ]
    for node in graph.nodes:
        for written in node.writes:
            if (stop := next((stops[t] for t in node.inputs if t in stops), None)) is not None:
                uses.append(
                    NonlinearUse(graph.nodes[stop].name, graph.nodes[stop].op, None, graph.variables[written].name)
                )
    return tuple(uses)


def meets_states(graph: OpGraph) -> bool:
    """Returns whether gradients meet a variable of the script that the step writes, such as one that adds them up.

    It is written once per batch, so that they meet it then, whatever is computed.

    Args:
        graph: a step, traced for a microbatch.
    """
    if not graph.written_states:
        return False
    gradients = {tensor.node for gradient in graph.gradients for tensor in gradient.tensors}
    after: set[int] = set()
    for number, node in enumerate(graph.nodes):
        before = graph.data_from[number]
        if not node.backward and not (after.isdisjoint(before) and gradients.isdisjoint(before)):
            after.add(number)
    stack, met = list(after), set(after)
    while stack:
        for number in graph.data_from[stack.pop()]:
            node = graph.nodes[number]
            # What layers compute belongs to the loss.
            if number not in met and number not in gradients and not node.backward and not node.call:
                met.add(number)
                stack.append(number)
    touched = {index for n in met for index in (*graph.nodes[n].reads, *graph.nodes[n].writes)}
    return not touched.isdisjoint(graph.written_states)


def owner_of(graph: OpGraph, tensor: Tensor, gradients: Collection[Tensor]) -> Tensor | None:
    """Returns the gradient that a tensor is a changed form of, such as a gradient that was clipped.

    A clipped gradient is a form of itself, although the norm that it was clipped by is made of several.

    Args:
        graph: a step.
        tensor: the tensor.
        gradients: the gradients.

    Returns:
        The only gradient that is met on ways back through tensors of the same shape; None where there are none, or
        several.
    """
    shape, met = graph.type_of(tensor).shape, set()
    stack, seen = [tensor], {tensor}
    while stack:
        current = stack.pop()
        if current in gradients:
            met.add(current)
            continue
        # A number that is made of gradients, such as a norm, belongs to none of them.
        for before in graph.nodes[current.node].inputs if shape else ():
            if before not in seen and graph.type_of(before).shape == shape:
                seen.add(before)
                stack.append(before)
    return met.pop() if len(met) == 1 else None


def _is_linear(graph: OpGraph, node: Node, linear: set[Tensor], finite: set[Tensor], on_samples: set[int]) -> bool:
    """Returns whether a node's outputs are linear in the inputs that are linear in gradients."""
    if node.writes:
        return True
    is_of_gradients = [t in linear for t in node.inputs]
    others_are_fixed = all(
        is_one or t.node not in on_samples for is_one, t in zip(is_of_gradients, node.inputs, strict=True)
    )
    if node.op in _LINEAR:
        # What is added to gradients may depend on samples, since it is averaged as they are.
        return True
    if node.op in _BILINEAR:
        return sum(is_of_gradients) == 1 and others_are_fixed
    if node.op in _QUOTIENTS:
        return not is_of_gradients[1] and others_are_fixed
    if node.op in _CHOICES:
        return node.inputs[0] in finite or (not is_of_gradients[0] and node.inputs[0].node not in on_samples)
    return False


def _reached(graph: OpGraph, starts: Iterable[int]) -> set[int]:
    """Returns all nodes that depend on one of some nodes."""
    found = set(starts)
    for number, before in enumerate(graph.data_from):
        if not found.isdisjoint(before):
            found.add(number)
    return found
