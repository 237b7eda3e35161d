"""Counts the bytes that a segment needs while it runs, besides its inputs.

The ops run as in TensorFlow's executor: first come, first served, two at once, each for its estimated time. What an op
makes exists from its begin on. What it is the last to read exists until its end:

    thread 0   a ──▶ b ─────────▶ d ──▶           a makes 4; b and c, which read that, make 8 and 4;
    thread 1         c ──▶                        d reads what b and c made, and makes 2

    in use     4     4 + 8 + 4    8 + 4 + 2       working set: 16

The inputs of a segment exist all the time, since the caller of a function holds its arguments.

An op that calls a function, or a loop, has the working set of its body, or of the fullest of its branches. Its results
are among what it made:

    made             4 ─ PartitionedCall ─ 4         working set: 4 + 4 + what the body has besides its results
                         └ a ─ b ─ c ┘
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from smp_tf.partition.graph.graph_caches import graph_cache
from smp_tf.partition.graph.node_def import MAX_DEPTH, attributes, bodies, functions
from smp_tf.partition.graph.op_graph import VARIABLE, Node, OpGraph, Tensor, TensorType
from smp_tf.partition.graph.op_kinds import (
    CALL_OPS,
    FREE_OPS,
    FUNCTION_OPS,
    IN_PLACE_OPS,
    LOOP_OPS,
    NO_MEMORY_OPS,
)
from smp_tf.partition.op_cost.folded_constants import folded_nodes, kept_constants
from smp_tf.partition.op_cost.function_cost import ASSUMED_TRIPS
from smp_tf.partition.op_cost.function_graph import function_graph
from smp_tf.partition.op_cost.loop_turns import turns_at_once
from smp_tf.partition.op_cost.repeated_ops import repeated_ops, without_repeated_ops
from smp_tf.partition.op_cost.workspace import workspace
from smp_tf.partition.split.memory_roots import memory_roots
from smp_tf.partition.split.split import Segment
from smp_tf.partition.units.cost import node_seconds

#: How many ops run at the same time. A plan must not depend on the machine that makes it. TensorFlow runs as many as
#: there are processors, and on a GPU the host is ahead of the device.
_AT_ONCE = 2
#: Two ops that run at once slow each other down, and either may be ahead. So an op that only a sum waits for is assumed
#: to take this many times as long.
_LATE = 2.0
#: How many turns of a loop have begun before the results of an earlier one are added to the loop's sums, where more
#: than two may be under way. For an LSTM's gradient, 1 to 9 of 16 were seen.
_AHEAD = 2
_ADDING_OPS = frozenset({"Add", "AddV2", "AddN"})


class Most(NamedTuple):
    """The most bytes that tensors take at once.

    Attributes:
        bytes: of all tensors.
        large: of large ones alone, which may be most at another moment.
    """

    bytes: int
    large: int

    def plus(self, other: Most) -> Most:
        """Returns the bytes of both together."""
        return Most(self.bytes + other.bytes, self.large + other.large)


class SegmentMemory(NamedTuple):
    """The bytes that a segment takes for itself.

    Attributes:
        working: the most that its tensors take at once while it runs.
        constants: what is computed once, and stays.
    """

    working: Most
    constants: Most


def segment_memory(
    graph: OpGraph,
    segment: Segment,
    seconds: Sequence[float],
    summed: Iterable[Tensor] = (),
    unknown: int = 1,
    least: int = 0,
    beyond: Mapping[int, int] | None = None,
) -> SegmentMemory:
    """Returns the bytes that a segment takes, without those of its inputs and of variables.

    Args:
        graph: the op graph.
        segment: the segment.
        seconds: how long each node of the graph takes.
        summed: outputs that are added to a sum at once, and so are not kept to the end.
        unknown: length assumed for dimensions that are known only when the step runs.
        least: bytes from which on a tensor is large.
        beyond: how many more bytes are taken while a node runs than is counted, below 0 for fewer, by node.
    """
    waits = dict(segment.after)
    repeated = repeated_ops(graph, segment.nodes, tuple(waits))
    graph = without_repeated_ops(graph, repeated)
    nodes = [number for number in segment.nodes if number not in repeated]
    kept = {Tensor(repeated.get(t.node, t.node), t.index) for t in set(segment.outputs).difference(summed)}
    after = _after(graph, nodes, {n: [repeated.get(b, b) for b in before] for n, before in waits.items()})
    late = _late(nodes, after, seconds, kept)
    seconds = [took * (_LATE if number in late else 1.0) for number, took in enumerate(seconds)]
    more = {repeated.get(number, number): count for number, count in (beyond or {}).items()}
    run = _Run(graph, nodes, seconds, kept, _Counting(unknown, least), 0, more)
    run.to_end(after)
    return SegmentMemory(Most(run.most, run.most_large), run.constants)


def _after(graph: OpGraph, nodes: Sequence[int], besides: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """Returns the nodes that wait for each node.

    Args:
        graph: the op graph.
        nodes: those that run.
        besides: nodes that a node waits for, besides those that it reads.
    """
    inside = frozenset(nodes)
    after: dict[int, list[int]] = {}
    for number in nodes:
        node = graph.nodes[number]
        before = inside.intersection((*[tensor.node for tensor in node.inputs], *node.control))
        for each in before.union(besides.get(number, ())):
            after.setdefault(each, []).append(number)
    return after


def _in_order(nodes: Sequence[int], after: Mapping[int, Sequence[int]]) -> list[int]:
    """Returns the nodes in an order in which each comes before those that wait for it."""
    waits = Counter(chain.from_iterable(after.values()))
    order = [number for number in nodes if not waits[number]]
    for number in order:
        for each in after.get(number, ()):
            waits[each] -= 1
            if not waits[each]:
                order.append(each)
    return order


def _late(
    nodes: Sequence[int],
    after: Mapping[int, Sequence[int]],
    seconds: Sequence[float],
    kept: Collection[Tensor],
) -> frozenset[int]:
    """Returns the nodes that only sums wait for, where more waits for others that are ready at the same time.

    The gradient of a kernel is one:

        gradient of the output ──▶ gradient of the input ──▶ ...        as long as the rest of backward
                              └──▶ gradient of the kernel ──▶ sum
    """
    needed = {tensor.node for tensor in kept}
    rest: dict[int, float] = {}
    for number in reversed(_in_order(nodes, after)):
        readers = after.get(number, ())
        rest[number] = max([seconds[reader] + rest[reader] for reader in readers], default=0.0)
        if needed.intersection(readers):
            needed.add(number)
    # For each node, the shortest among what waits longest for those that it reads.
    ahead: dict[int, float] = {}
    for readers in after.values():
        longest = max([rest[reader] for reader in readers])
        for reader in readers:
            ahead[reader] = min(longest, ahead.get(reader, longest))
    return frozenset([n for n in nodes if n not in needed and n in ahead and rest[n] < ahead[n]])


class _Counting(NamedTuple):
    """How bytes are counted.

    Attributes:
        unknown: length assumed for dimensions that are known only when the step runs.
        least: bytes from which on a tensor is large.
    """

    unknown: int
    least: int

    def of(self, kind: TensorType) -> Most:
        """Returns the bytes of a tensor."""
        count = kind.nbytes(self.unknown)
        return Most(count, kind.nbytes(self.unknown, self.least) if count >= self.least else 0)


class _Run:
    """Simulates nodes that run, some at the same time, and counts the bytes of their tensors.

    Args:
        graph: the op graph.
        nodes: those that run.
        seconds: how long each node of the graph takes.
        kept: tensors that still exist at the end.
        counting: how bytes are counted.
        depth: number of calls and loops around them.
        beyond: how many more bytes are taken while a node runs than is counted, by node.
    """

    def __init__(
        self,
        graph: OpGraph,
        nodes: Sequence[int],
        seconds: Sequence[float],
        kept: Collection[Tensor],
        counting: _Counting,
        depth: int,
        beyond: Mapping[int, int],
        constant: Collection[int] = (),
    ) -> None:
        self._graph, self._nodes, self._seconds, self._beyond = graph, nodes, seconds, beyond
        self._counting, self._depth = counting, depth
        folded = folded_nodes(graph, nodes, constant)
        self._constant = folded.union(constant)
        #: The bytes of what is computed once, in functions as well.
        self.constants = Most(0, 0)
        for tensor in kept_constants(graph, nodes, folded, kept):
            self.constants = self.constants.plus(counting.of(graph.type_of(tensor)))
        root = memory_roots(graph, nodes)
        self._size: dict[Tensor, Most] = {}
        #: For each node, the memory that it reads, and its outputs that have memory of their own.
        self._read = {n: [root.get(tensor, tensor) for tensor in graph.nodes[n].inputs] for n in nodes}
        self._made = {n: [tensor for tensor in self._in_memory(n) if tensor not in root] for n in nodes}
        self._readers = Counter(chain.from_iterable(self._read.values()))
        self._readers.update([root.get(tensor, tensor) for tensor in kept])
        #: The bytes now, and the most so far: of all tensors, and of large ones.
        self.in_use = self.most = 0
        self.in_use_large = self.most_large = 0

    def _in_memory(self, number: int) -> list[Tensor]:
        """Returns the outputs of a node, but for those that lie in memory that exists anyway."""
        is_there = self._graph.nodes[number].op in NO_MEMORY_OPS or number in self._constant
        return [] if is_there else self._graph.tensors_of(number)

    def to_end(self, after: Mapping[int, Sequence[int]]) -> None:
        """Runs all nodes.

        Args:
            after: the nodes that wait for each.
        """
        waits = Counter(chain.from_iterable(after.values()))
        ready = deque(number for number in self._nodes if not waits[number])
        running: list[tuple[float, int, int, Most]] = []
        now, begun = 0.0, 0
        while ready or running:
            if ready and len(running) < _AT_ONCE:
                done = ready.popleft()
                own = self._begin(done)
                if done not in self._constant and self._graph.nodes[done].op not in FREE_OPS:
                    begun += 1
                    heapq.heappush(running, (now + self._seconds[done], begun, done, own))
                    continue
            else:
                now, _, done, own = heapq.heappop(running)
            self._end(done, own)
            for each in after.get(done, ()):
                waits[each] -= 1
                if not waits[each]:
                    ready.append(each)

    def _begin(self, number: int) -> Most:
        """Adds the bytes that a node makes and those that it takes for itself, and returns the latter."""
        node, counting = self._graph.nodes[number], self._counting
        if node.op in FUNCTION_OPS:
            own, constants = _in_functions(self._graph, node, self._constant, counting, self._depth)
            self.constants = self.constants.plus(constants)
        elif number in self._constant:
            own = Most(0, 0)
        else:
            taken = workspace(self._graph, node, counting.unknown)
            own = Most(taken, taken if taken >= counting.least else 0)
        made = self._made[number]
        sizes = [counting.of(node.outputs[tensor.index]) for tensor in made]
        self._size.update(zip(made, sizes, strict=True))
        if node.op in IN_PLACE_OPS and made:
            # An input that nothing else reads gives its memory to the output.
            for source in self._read[number]:
                if self._readers[source] == 1 and self._size.get(source) == self._size[made[0]]:
                    self._free(self._size.pop(source))
                    break
        for count, large in (own, *sizes):
            self.in_use += count
            self.in_use_large += large
        more = self._beyond.get(number, 0)
        self.most = max(self.most, self.in_use + more)
        self.most_large = max(self.most_large, self.in_use_large + more)
        return own

    def _end(self, number: int, own: Most) -> None:
        """Frees what a node took for itself, and what nothing else reads."""
        self._free(own)
        for tensor in self._made[number]:
            if not self._readers[tensor]:
                self._free(self._size.pop(tensor))
        for source in self._read[number]:
            self._readers[source] -= 1
            if not self._readers[source] and source in self._size:
                self._free(self._size.pop(source))

    def _free(self, freed: Most) -> None:
        self.in_use -= freed.bytes
        self.in_use_large -= freed.large


def _in_functions(
    graph: OpGraph, node: Node, constant: Collection[int], counting: _Counting, depth: int
) -> SegmentMemory:
    """Returns the most bytes that the functions of a node have, besides their results. Some nodes are constants."""
    if not node.definition or depth > MAX_DEPTH:
        return SegmentMemory(Most(0, 0), Most(0, 0))
    given = tuple(_given(graph, tensor) for tensor in node.inputs)
    # TensorFlow prepares a called function for the constants that it is given. What a loop is given changes.
    handed_in = tuple(n for n, t in enumerate(node.inputs) if t.node in constant) if node.op in CALL_OPS else ()
    if node.op in LOOP_OPS:
        # The arguments of a turn may have other shapes than those of the loop.
        pairs = zip(given, node.outputs, strict=True)
        given = tuple(before if before.dtype == "resource" else after for before, after in pairs)
    elif node.op not in CALL_OPS:
        # The first argument chooses the branch.
        given = given[1:]
    known = functions(graph.library)
    trips = max((kind.entries for kind in (*given, *node.outputs)), default=0) or ASSUMED_TRIPS
    called = [name for name in bodies(attributes(node)) if name in known]
    ahead = min(_AHEAD, turns_at_once(node) - 1, trips - 1) if node.op in LOOP_OPS else 0
    call = _Function(trips, ahead, handed_in)
    found = [_in_function(graph.library, name, given, node.outputs, call, counting, depth) for name in called]
    nothing = SegmentMemory(Most(0, 0), Most(0, 0))
    return SegmentMemory(*(Most(*map(max, zip(*counts, strict=True))) for counts in zip(nothing, *found, strict=True)))


def _given(graph: OpGraph, tensor: Tensor) -> TensorType:
    """Returns the type of an input. That of a variable's handle has the type of the variable."""
    node, kind = graph.nodes[tensor.node], graph.type_of(tensor)
    if node.op == VARIABLE and node.source is not None:
        return TensorType(kind.dtype, kind.shape, graph.variables[node.source].type)
    return kind


class _Function(NamedTuple):
    """How a node calls its functions.

    Attributes:
        trips: how often a loop runs where its body does not say it.
        ahead: how many turns of a loop are ahead of the loop's sums.
        constant: which arguments are constants.
    """

    trips: int
    ahead: int
    constant: tuple[int, ...]


@graph_cache(1024)
def _in_function(
    library: bytes,
    name: str,
    given: tuple[TensorType, ...],
    results: tuple[TensorType, ...],
    call: _Function,
    counting: _Counting,
    depth: int,
) -> SegmentMemory:
    """Returns the most bytes that a function has at once besides its results, and those of its constants."""
    body = function_graph(library, name, given, results, call.trips)
    repeated = repeated_ops(body, tuple(range(len(given), len(body.nodes))))
    body = without_repeated_ops(body, repeated)
    nodes = [number for number in range(len(given), len(body.nodes)) if number not in repeated]
    seconds, kept = node_seconds(body, unknown=counting.unknown), set(body.outputs)
    run = _Run(body, nodes, seconds, kept, counting, depth + 1, {}, call.constant)
    run.to_end(_after(body, nodes, {}))
    added, ahead = _added_up(body, len(given), counting), call.ahead
    return SegmentMemory(
        Most(run.most - run.in_use + ahead * added.bytes, run.most_large - run.in_use_large + ahead * added.large),
        run.constants,
    )


def _added_up(body: OpGraph, given: int, counting: _Counting) -> Most:
    """Returns the bytes that a turn of a loop adds to sums for which no op of the next turn waits."""
    root = memory_roots(body, range(given, len(body.nodes)))
    added: list[Most] = []
    for index, tensor in enumerate(body.outputs):
        node = body.nodes[root.get(tensor, tensor).node]
        sources = [root.get(source, source) for source in node.inputs]
        if node.op in _ADDING_OPS and Tensor(index, 0) in sources:
            added += [counting.of(body.type_of(source)) for source in sources if source.node >= given]
    return Most(sum(each.bytes for each in added), sum(each.large for each in added))
