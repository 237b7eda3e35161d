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

An op that calls a function, or a loop, has the working set of its body, the fullest of its branches; its results are
among what it made:

    made             4 ─ PartitionedCall ─ 4         working set: 4 + 4 + what the body has beside its results
                         └ a ─ b ─ c ┘
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from smp_tf.partition.function_cost import ASSUMED_TRIPS
from smp_tf.partition.function_graph import function_graph
from smp_tf.partition.node_def import MAX_DEPTH, attributes, functions
from smp_tf.partition.op_graph import VARIABLE, Node, OpGraph, Tensor, TensorType
from smp_tf.partition.op_kinds import (
    CALL_OPS,
    FREE_OPS,
    FUNCTION_OPS,
    IN_PLACE_OPS,
    LOOP_OPS,
    NO_MEMORY_OPS,
    SAME_MEMORY_OPS,
)
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
    kept = set(segment.outputs).difference(summed)
    most, _ = _walk(graph, segment.nodes, dict(segment.after), kept, unknown, 0)
    return most


def _walk(
    graph: OpGraph,
    nodes: Sequence[int],
    besides: Mapping[int, Sequence[int]],
    kept: Collection[Tensor],
    unknown: int,
    depth: int,
) -> tuple[int, int]:
    """The most bytes that tensors of some nodes take at once, and those there at the end."""
    root = memory_roots(graph, nodes)
    readers: Counter[Tensor] = Counter()
    size: dict[Tensor, int] = {}
    for number in nodes:
        node = graph.nodes[number]
        for tensor in node.inputs:
            readers[root.get(tensor, tensor)] += 1
    for tensor in kept:
        readers[root.get(tensor, tensor)] += 1
    in_use = most = unfreed = 0
    for number in _order(graph, nodes, besides):
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
                    in_use -= size.pop(source, 0)
                    break
        in_use += sum(size[tensor] for tensor in made)
        own = _in_functions(graph, node, unknown, depth) if node.op in FUNCTION_OPS else workspace(graph, node, unknown)
        most = max(most, in_use + own)
        if node.op not in FREE_OPS:
            in_use, unfreed = in_use - unfreed, 0
        unfreed += sum(size.pop(tensor) for tensor in made if not readers[tensor])
        for source in sources:
            readers[source] -= 1
            if not readers[source]:
                unfreed += size.pop(source, 0)
    return most, in_use - unfreed


def _in_functions(graph: OpGraph, node: Node, unknown: int, depth: int) -> int:
    """The most bytes that the functions which a node calls have at once, beside what they give."""
    if not node.definition or depth > MAX_DEPTH:
        return 0
    attrs = attributes(node)
    given = tuple(_given(graph, tensor) for tensor in node.inputs)
    if node.op in LOOP_OPS:
        # What a turn is given may be of another shape than what the loop was given.
        pairs = zip(given, node.outputs, strict=True)
        names, given = [attrs["body"].func.name], tuple(i if i.dtype == "resource" else o for i, o in pairs)
    elif node.op in CALL_OPS:
        names = [attrs["f"].func.name]
    elif "branches" in attrs:
        names, given = [function.name for function in attrs["branches"].list.func], given[1:]
    else:
        names, given = [attrs["then_branch"].func.name, attrs["else_branch"].func.name], given[1:]
    known = functions(graph.library)
    trips = max((kind.entries for kind in (*given, *node.outputs)), default=0) or ASSUMED_TRIPS
    called = [name for name in names if name in known]
    return max(
        (_in_function(graph.library, name, given, node.outputs, trips, unknown, depth) for name in called), default=0
    )


def _given(graph: OpGraph, tensor: Tensor) -> TensorType:
    """The type of an input; that of a variable's handle with the type of the variable."""
    node, kind = graph.nodes[tensor.node], graph.type_of(tensor)
    if node.op == VARIABLE and node.source is not None:
        return TensorType(kind.dtype, kind.shape, graph.variables[node.source].type)
    return kind


@lru_cache(maxsize=1024)
def _in_function(
    library: bytes,
    name: str,
    given: tuple[TensorType, ...],
    results: tuple[TensorType, ...],
    trips: int,
    unknown: int,
    depth: int,
) -> int:
    """The most bytes that a function has at once, beside what it gives."""
    body = function_graph(library, name, given, results, trips)
    most, left = _walk(body, range(len(given), len(body.nodes)), {}, set(body.outputs), unknown, depth + 1)
    return most - left


def _order(graph: OpGraph, nodes: Sequence[int], besides: Mapping[int, Sequence[int]]) -> Iterator[int]:
    """Nodes in the order in which they become ready."""
    inside = frozenset(nodes)
    waits: dict[int, int] = {}
    after: dict[int, list[int]] = {}
    for number in nodes:
        node = graph.nodes[number]
        before = {t.node for t in node.inputs if t.node in inside} | {c for c in node.control if c in inside}
        before.update(besides.get(number, ()))
        waits[number] = len(before)
        for each in before:
            after.setdefault(each, []).append(number)
    ready = deque(number for number in nodes if not waits[number])
    while ready:
        number = ready.popleft()
        yield number
        for each in after.get(number, ()):
            waits[each] -= 1
            if not waits[each]:
                ready.append(each)
