"""How many bytes a segment has in flight while it runs, beside what it was given.

The ops are walked in the order in which TensorFlow runs them, which is first come, first served. Each here makes a
tensor, and only the next one reads it:

    op        a      b      c      d
    made      4 ─────▶
                     8 ─────▶
                            4 ─────▶
                                   2 ──▶
    in use    4     12     16     14           working set: 16

TensorFlow runs two ops at once where it can, so what an op is the last to read goes only when the next one is done.
What a segment was given is there all the time, since whoever calls a function holds its arguments.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator

from smp_tf.partition.op_graph import OpGraph, Tensor
from smp_tf.partition.op_kinds import FREE_OPS, IN_PLACE_OPS, NO_MEMORY_OPS, SAME_MEMORY_OPS
from smp_tf.partition.passed_through import passed_through
from smp_tf.partition.split import Segment
from smp_tf.partition.workspace import workspace


def memory_roots(graph: OpGraph, nodes: Collection[int]) -> dict[Tensor, Tensor]:
    """The tensor in whose memory a tensor lies, for those that are another name for the memory of another one.

    Args:
        graph: the op graph.
        nodes: nodes that run in one process, in order; what comes from elsewhere has memory of its own.
    """
    root: dict[Tensor, Tensor] = {}
    for number in nodes:
        node = graph.nodes[number]
        if node.op in SAME_MEMORY_OPS:
            for index, tensor in enumerate(node.inputs[: len(node.outputs)]):
                root[Tensor(number, index)] = root.get(tensor, tensor)
        for index, source in passed_through(graph.library, node).items():
            root[Tensor(number, index)] = root.get(node.inputs[source], node.inputs[source])
    return root


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
    root = memory_roots(graph, segment.nodes)
    readers: Counter[Tensor] = Counter()
    size: dict[Tensor, int] = {}
    for number in segment.nodes:
        node = graph.nodes[number]
        for tensor in node.inputs:
            readers[root.get(tensor, tensor)] += 1
    for tensor in set(segment.outputs).difference(summed):
        readers[root.get(tensor, tensor)] += 1
    in_use = most = unfreed = 0
    for number in _order(graph, segment):
        node = graph.nodes[number]
        made = [] if node.op in NO_MEMORY_OPS else [Tensor(number, i) for i in range(len(node.outputs))]
        made = [tensor for tensor in made if tensor not in root]
        for tensor in made:
            size[tensor] = graph.type_of(tensor).nbytes(unknown)
        sources = [root.get(tensor, tensor) for tensor in node.inputs]
        if node.op in IN_PLACE_OPS and made:
            # An input that nobody else reads gives its memory to the output.
            for source in sources:
                if readers[source] == 1 and size.get(source, 0) == size[made[0]]:
                    in_use -= size.pop(source)
                    break
        in_use += sum(size[tensor] for tensor in made)
        most = max(most, in_use + workspace(graph, node, unknown))
        if node.op not in FREE_OPS:
            in_use, unfreed = in_use - unfreed, 0
        unfreed += sum(size.pop(tensor) for tensor in made if not readers[tensor])
        for source in sources:
            readers[source] -= 1
            if not readers[source]:
                unfreed += size.pop(source, 0)
    return most


def _order(graph: OpGraph, segment: Segment) -> Iterator[int]:
    """The nodes of a segment in the order in which they become ready."""
    inside, besides = frozenset(segment.nodes), dict(segment.after)
    waits: dict[int, int] = {}
    after: dict[int, list[int]] = {}
    for number in segment.nodes:
        node = graph.nodes[number]
        before = {t.node for t in node.inputs if t.node in inside} | {c for c in node.control if c in inside}
        before.update(besides.get(number, ()))
        waits[number] = len(before)
        for each in before:
            after.setdefault(each, []).append(number)
    ready = deque(number for number in segment.nodes if not waits[number])
    while ready:
        number = ready.popleft()
        yield number
        for each in after.get(number, ()):
            waits[each] -= 1
            if not waits[each]:
                ready.append(each)
