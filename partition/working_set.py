"""How many bytes a segment has in flight while it runs, beside what it was given.

The ops are walked in the order of the trace; a tensor is there from the op that makes it to its last reader:

    op        a      b      c      d
    made      4 ──────────────┐
                     8 ───────┤
                            4 ┘─────▶
    in use    4     12     16      4           working set: 16

TensorFlow may run ops in another order and reuse an input's memory for an output, so this is an estimate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from smp_tf.partition.op_graph import OpGraph, Tensor
from smp_tf.partition.split import Segment

#: Ops whose output is another name for their first input's memory.
_SAME_MEMORY = frozenset(
    {
        *("Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims"),
        *("StopGradient", "PreventGradient", "Bitcast", "CheckNumerics"),
    }
)
#: Ops whose output lies in memory that is there anyway: of a variable, or of the graph itself.
_OWN_MEMORY = frozenset({"Const", "ReadVariableOp"})


def working_set(graph: OpGraph, segment: Segment, summed: Iterable[Tensor] = (), unknown: int = 1) -> int:
    """The most bytes that a segment's own tensors take at once.

    Args:
        graph: the op graph.
        segment: the segment.
        summed: outputs that are added to a sum at once, and so are not kept to the end.
        unknown: length assumed for dimensions that are only known when the step runs.

    Returns:
        Bytes, those of the segment's inputs and of the variables left out.
    """
    holder: dict[Tensor, Tensor] = {}

    def held_by(tensor: Tensor) -> Tensor:
        return holder.get(tensor, tensor)

    inside = frozenset(segment.nodes)
    readers: Counter[Tensor] = Counter()
    size: dict[Tensor, int] = {}
    for number in segment.nodes:
        node = graph.nodes[number]
        for index in range(len(node.outputs)):
            tensor = Tensor(number, index)
            if node.op in _SAME_MEMORY and index < len(node.inputs):
                holder[tensor] = held_by(node.inputs[index])
            elif node.op not in _OWN_MEMORY:
                size[tensor] = node.outputs[index].nbytes(unknown)
        for tensor in node.inputs:
            readers[held_by(tensor)] += 1
    for tensor in set(segment.outputs).difference(summed):
        readers[held_by(tensor)] += 1
    in_use = most = 0
    for number in segment.nodes:
        node = graph.nodes[number]
        made = [t for t in (Tensor(number, i) for i in range(len(node.outputs))) if t in size]
        in_use += sum(size[t] for t in made)
        most = max(most, in_use)
        in_use -= sum(size[t] for t in made if not readers[t])
        for tensor in node.inputs:
            source = held_by(tensor)
            readers[source] -= 1
            if not readers[source] and source.node in inside:
                in_use -= size.get(source, 0)
    return most
