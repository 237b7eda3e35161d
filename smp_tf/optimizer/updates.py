"""How updates of weights run in a graph: bucket by bucket, each marked for timelines, and few large ones at once.

Gradients come in buckets, as they were averaged over the replicas. No bucket's updates wait for another bucket's.

An optimizer of Keras makes tensors as large as a weight while it updates the weight, and does not order the weights.
TensorFlow runs what is ready: the first op of every weight, then the second op of every weight. So the temporaries of
all weights exist together, besides all gradients. Therefore the update of a large weight waits for earlier ones:

    weight 0   mul ─▶ add ─▶ assign ─┐
    weight 1   mul ─▶ add ─▶ assign ─┼─┐
    weight 2                         └─┼─▶ mul ─▶ add ─▶ assign
    weight 3                           └─▶ mul ─▶ add ─▶ assign

The order in which ops were made shows where one weight's update ends and the next one's begins. An op waits only for
earlier ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from smp_tf import tf_internals
from smp_tf.job import runtime
from smp_tf.pipeline.planner.updates_at_once import FEW, LARGE, most_at_once
from smp_tf.pipeline.run import marks
from smp_tf.replicas.gradient_marks import computed

#: Ops that take a variable and do not write it.
_ONLY_READ = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp"})


def is_split(running: runtime.Runtime) -> bool:
    """Returns whether steps are cut into stages, microbatches or replicas."""
    return running.topology.size > 1 or running.config.microbatches > 1


def applying(pairs: Sequence[tuple[Any, Any]]) -> contextlib.AbstractContextManager[Any]:
    """Returns a context that a timeline shows as the apply of this rank.

    Where nothing is split, nothing is marked, so that a graph is op for op what it is without smp_tf. What XLA compiles
    cannot be marked.

    Args:
        pairs: gradients, or None, and variables that this rank updates.
    """
    running = runtime.current_or_none()
    if running is None or not is_split(running) or tf_internals.is_compiled_by_xla():
        return contextlib.nullcontext()
    return _marked(running.topology.stage, [(g, v) for g, v in pairs if g is not None])


@contextlib.contextmanager
def _marked(chunk: int, pairs: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Notes what is done in its context, bucket by bucket."""
    after: dict[int | None, list[Any]] = {}
    changed: dict[int | None, list[Any]] = {}
    for gradient, variable in pairs:
        made = computed(gradient)
        bucket = made.bucket if made is not None else None
        waits_for = after.setdefault(bucket, [made.ended] if made is not None else [])
        waits_for.append(gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient)
        changed.setdefault(bucket, []).append(variable)
    with contextlib.ExitStack() as together:
        for bucket, waits_for in after.items():
            together.enter_context(marks.applying(chunk, waits_for, changed[bucket], bucket))
        yield


@contextlib.contextmanager
def few_at_once(pairs: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Lets an optimizer update variables within its context, only a few large ones at a time.

    Where nothing is split, a graph stays op for op what it is without smp_tf. Eagerly, ops run one after the other. A
    graph for sessions stays as it is, too, since running a single update should not run others. What an optimizer makes
    of all gradients before its first update, such as to clip each by its norm, or of all weights after the last one, is
    not delayed.

    Args:
        pairs: gradients, or None, and variables that this rank updates.
    """
    graph = tf.compat.v1.get_default_graph()
    running = runtime.current_or_none()
    is_plain = running is None or not is_split(running) or not tf_internals.is_function(graph)
    if running is None or is_plain or tf_internals.is_compiled_by_xla():
        yield
        return
    pairs = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
    groups = _groups(pairs, graph, running.topology.replicas)
    before = len(graph.get_operations())
    yield
    # A weight that waits for nothing also ends an update, since what follows is not its own.
    lane_of: dict[int, tuple[_Lane | None, int]] = {id(variable.handle): (None, 0) for _, variable in pairs}
    for group in groups:
        lane_of |= _Lane.of(group)
    written = {inside.name: lane_of[id(given)] for given, inside in graph.captures if id(given) in lane_of}
    if any(lane is not None for lane, _ in written.values()):
        _let_wait(graph.get_operations()[before:], written)


def _groups(pairs: Sequence[tuple[Any, Any]], graph: Any, replicas: int) -> Iterable[Sequence[Any]]:
    """Returns groups of variables whose gradients come together, so that their updates may wait for each other."""
    groups: dict[int | None, list[Any]] = {}
    for gradient, variable in pairs:
        made = computed(gradient)
        # Gradients made from averages may come one by one. But a branch begins when all of its inputs are there.
        if made is not None or replicas == 1 or getattr(gradient, "graph", None) is not graph:
            groups.setdefault(made.bucket if made is not None else None, []).append(variable)
    return groups.values()


@dataclass
class _Lane:
    """The updates of one group of weights that were handled so far.

    Args:
        most: the most bytes of weights that may be under way.
        under_way: the ops that end the last updates, and bytes of their weights.
    """

    most: int
    under_way: list[tuple[tf.Operation, int]] = field(default_factory=list)

    @classmethod
    def of(cls, variables: Sequence[Any]) -> dict[int, tuple[_Lane | None, int]]:
        """Returns the variables of a group, by handle; none where the group has no more large ones than may run."""
        sizes = ((id(variable.handle), _bytes(variable)) for variable in variables)
        large = [(handle, size) for handle, size in sizes if size >= LARGE]
        lane = cls(most_at_once(size for _, size in large))
        return {handle: (lane, size) for handle, size in large} if len(large) > FEW else {}

    def begin(self, size: int) -> list[tf.Operation]:
        """Returns the ends of the updates that must be done before one of a number of bytes begins.

        An update that waits holds a place of its own size. Where sizes differ, it may wait for a larger one.
        """
        ends = []
        while len(self.under_way) >= FEW and sum(each for _, each in self.under_way) + size > self.most:
            ends.append(self.under_way.pop(0)[0])
        return ends


def _let_wait(operations: Sequence[tf.Operation], written: Mapping[str, tuple[_Lane | None, int]]) -> None:
    """Lets updates wait for earlier ones.

    Args:
        operations: operations of the optimizer, in the order in which they were made.
        written: the lane of a weight, or None, and its bytes, by the name of its handle in the graph.
    """
    own: list[tf.Operation] = []
    for operation in operations:
        found = (
            None
            if operation.type in _ONLY_READ
            else next((written[t.name] for t in operation.inputs if t.name in written), None)
        )
        if found is None:
            own.append(operation)
            continue
        lane, size = found
        if lane is not None:
            ends = lane.begin(size)
            for first in _first_large(own) if ends else ():
                tf_internals.wait_for(first, ends)
            lane.under_way.append((operation, size))
        own = []


def _first_large(operations: Sequence[tf.Operation]) -> Iterator[tf.Operation]:
    """Yields the ops that take or make something large, except those that follow another one."""
    behind: set[str] = set()
    for operation in operations:
        if any(before.name in behind for before in (*(t.op for t in operation.inputs), *operation.control_inputs)):
            behind.add(operation.name)
        elif any(_bytes(t) >= LARGE for t in (*operation.inputs, *operation.outputs)):
            behind.add(operation.name)
            yield operation


def _bytes(tensor: Any) -> int:
    """Returns the bytes of a tensor or variable; 0 where its shape is unknown."""
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size if tensor.dtype != tf.resource else 0
