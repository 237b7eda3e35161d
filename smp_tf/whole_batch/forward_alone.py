"""Takes the forward pass out of a step, to be run alone, ahead of the step, for losses that compare samples.

The gradient of such a loss by what the model gives for one sample depends on what it gives for all others. So it is
known after all microbatches have run forward, and before the first runs backward:

    forward alone     F0 F1 F2 F3 ──▶ outputs of the whole batch ──▶ loss, once ──▶ its gradient by the outputs
                                                                                    │ cut into microbatches
    the step          F0 F1 B0 F2 B1 F3 B2 B3    in the order of any schedule  ◀────┘

Each microbatch runs forward twice, and only those that the schedule has under way keep their activations. This is the
gradient cache of Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (2021), section
3. The second time, weights are the same, and random numbers are too (`variables/step_seeds.py`). Nothing is written the
first time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from smp_tf.partition.graph.op_graph import OpGraph, Tensor
from smp_tf.partition.rewrite.randomness import ops_with_state
from smp_tf.steps.trace import StepTrace


class NotAloneError(Exception):
    """The forward pass of a step cannot be run ahead of it, since it changes something or would come out otherwise."""


def forward_alone(traced: StepTrace) -> StepTrace:
    """Returns a step that only gives its results, and changes nothing.

    Args:
        traced: the trace of the step. Its results are tensors of the forward pass.

    Raises:
        NotAloneError: the results depend on something that the step changes.
    """
    graph = traced.lowered.graph
    needed = needed_alone(graph, graph.outputs)
    nodes = tuple(
        dataclasses.replace(node, control=tuple(c for c in node.control if c in needed))
        if number in needed
        # What is not stateful, and needed by nobody, is taken out before the step is placed. Until then the random ops
        # are counted, which have to come to the same numbers as in the step itself.
        else dataclasses.replace(node, stateful=False, writes=(), control=())
        for number, node in enumerate(graph.nodes)
    )
    lowered = dataclasses.replace(traced.lowered, graph=dataclasses.replace(graph, nodes=nodes, gradients=()))
    return StepTrace(traced.trace, lowered, traced.models)


def needed_alone(graph: OpGraph, wanted: Iterable[Tensor]) -> set[int]:
    """Returns the nodes that compute tensors of a step, provided that they change nothing.

    Args:
        graph: the step.
        wanted: the tensors.

    Raises:
        NotAloneError: they depend on something that the step changes.
    """
    needed: set[int] = set()
    other = ops_with_state(graph)
    stack = [tensor.node for tensor in wanted]
    while stack:
        number = stack.pop()
        if number in needed:
            continue
        needed.add(number)
        node = graph.nodes[number]
        if node.writes or number in other:
            raise NotAloneError(f"op {node.name!r} ({node.op}) would have another result the second time")
        for before in node.control:
            written = graph.nodes[before].writes
            if set(written) & set(node.reads):
                raise NotAloneError(f"op {node.name!r} reads what op {graph.nodes[before].name!r} has written")
            if not written:
                stack.append(before)
        stack.extend(tensor.node for tensor in node.inputs)
    return needed
