"""Finds the parts of a step that can be computed for a whole batch from tensors of its microbatches.

A step is cut into microbatches, and its losses and logs are averages over these. To see whether one process would
compute the same, the end of the step, its *tail*, is computed once for all samples:

    microbatch 0 ─ layers ─▶ rows ┐
    microbatch 1 ─ layers ─▶ rows ├─ joined ─▶ tail of the whole batch's graph ─▶ loss, logs
    microbatch 2 ─ layers ─▶ rows ┘

The tail begins as near to the results as tensors hold rows (`sample_rows.py`). So a loss over logits needs only the
losses of samples. A contrastive loss compares samples and needs the outputs of layers.

What a step computes of gradients, such as a norm to clip by, can be computed of the whole batch's gradients. These are
the averages over its microbatches. Where they are given, weights are read too, on the ranks that store them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from smp_tf.partition.graph.op_graph import ARGUMENT, SOURCES, UNSENDABLE_DTYPES, VARIABLE, Node, OpGraph, Tensor
from smp_tf.partition.graph.op_kinds import RANDOM_OPS
from smp_tf.partition.samples.sample_rows import Rows

#: Why a result that is made of gradients cannot be computed.
DEPENDS_ON_GRADIENTS = "it depends on gradients"
#: Why a result that is made of samples cannot be computed, where none may go into it.
OF_SAMPLES = "samples go into it, and those of all replicas cannot be joined"


@dataclass(frozen=True, slots=True)
class Cut:
    """A tensor where the tail begins.

    Args:
        whole: the tensor in the whole batch's graph.
        part: the same tensor in a microbatch's graph.
        axis: the axis along which the microbatches are joined; None for a tensor that is the same in all of them, since
            it depends on no sample.
        blocks: of how many blocks of rows it consists, each with a row a sample.
    """

    whole: Tensor
    part: Tensor
    axis: int | None
    blocks: int = 1


@dataclass(frozen=True)
class Tail:
    """What is computed for a whole batch.

    Args:
        nodes: nodes of the whole graph that it consists of, in topological order.
        cuts: the tensors where it begins.
        arguments: numbers of the step's tensor arguments that it reads.
        results: what it gives, by name: tensors of the whole graph, and numbers of nodes that write.
        left_out: why other results cannot be computed, by name.
        touched: the variables of the script that are read or written for each result, by name.
        gradients: the given gradients that it reads.
        shapes: shapes of other tensors at which it begins, too, each with what is known of it. At most one length is
            open.
    """

    nodes: tuple[int, ...]
    cuts: tuple[Cut, ...]
    arguments: tuple[int, ...]
    results: Mapping[str, tuple[Tensor | int, ...]]
    left_out: Mapping[str, str]
    touched: Mapping[str, frozenset[int]]
    gradients: tuple[Tensor, ...] = ()
    shapes: Mapping[Tensor, tuple[int | None, ...]] = field(default_factory=dict)


def find_tail(
    whole: OpGraph,
    rows: Rows,
    wanted: Mapping[str, Sequence[Tensor | int]],
    gradients: Collection[Tensor] = (),
    *,
    begins_at_model: bool = False,
    of_samples: bool = True,
    runs_layers: bool = False,
) -> Tail:
    """Finds the tail of a step that gives some of its results.

    Args:
        whole: the step, traced for all samples of a batch.
        rows: what the tensors of `whole` are made of.
        wanted: what is to be computed together, by name: tensors of `whole`, and numbers of its nodes that write.
        gradients: tensors of `whole` that stand for gradients which will be there for the whole batch.
        begins_at_model: whether cuts are only made where a tensor depends on a model, and has one row for each sample.
            All else is computed of the arguments.
        of_samples: whether samples may go into it. Otherwise results are made of gradients and weights alone.
        runs_layers: whether layers with weights may be part of the tail, as where it is computed a single time.

    Returns:
        The tail of the results that can be computed, and why the others cannot.
    """
    found = {
        name: _Walk(
            whole,
            rows,
            frozenset(gradients),
            begins_at_model=begins_at_model,
            of_samples=of_samples,
            runs_layers=runs_layers,
        ).back_from(targets)
        for name, targets in wanted.items()
    }
    left_out = {name: walk.obstacle for name, walk in found.items() if walk.obstacle is not None}
    walks = [walk for walk in found.values() if walk.obstacle is None]
    nodes = set().union(*(walk.nodes for walk in walks))
    cuts = {cut.whole: cut for walk in walks for cut in walk.cuts.values()}
    arguments = {whole.nodes[n].source for n in nodes if whole.nodes[n].op == ARGUMENT}
    return Tail(
        tuple(sorted(nodes)),
        tuple(cuts[tensor] for tensor in sorted(cuts)),
        tuple(sorted(number for number in arguments if number is not None)),
        {name: tuple(targets) for name, targets in wanted.items() if name not in left_out},
        left_out,
        {name: _touched(whole, walk.nodes) for name, walk in found.items() if walk.obstacle is None},
        tuple(sorted(set().union(*(walk.used for walk in walks)))),
    )


def tail_from(graph: OpGraph, cuts: Sequence[Cut], results: Mapping[str, tuple[Tensor | int, ...]]) -> Tail:
    """Returns the tail of a step that begins at given tensors, at its arguments, and where only a shape is asked for.

    Args:
        graph: the step.
        cuts: where the tail begins; `whole` names tensors of `graph`.
        results: what it gives, by name: tensors of `graph`.
    """
    begins = {cut.whole for cut in cuts}
    stack = [tensor for tensors in results.values() for tensor in tensors if isinstance(tensor, Tensor)]
    nodes: set[int] = set()
    shapes: dict[Tensor, tuple[int | None, ...]] = {}
    after: set[int] = set()
    for number, node in enumerate(graph.nodes):
        if not (begins.isdisjoint(node.inputs) and after.isdisjoint(graph.data_from[number])):
            after.add(number)
    while stack:
        tensor = stack.pop()
        node = graph.nodes[tensor.node]
        if tensor in begins or tensor.node in nodes:
            continue
        # The shape of what is made of the cuts is made of them too.
        is_before = node.op == "Shape" and tensor.node not in after
        shape = graph.type_of(node.inputs[0]).shape if is_before else None
        if shape is not None and shape.count(None) <= 1:
            shapes[tensor] = shape
        else:
            left = [tensor.node]
            while left:
                number = left.pop()
                if number not in nodes:
                    nodes.add(number)
                    stack.extend(graph.nodes[number].inputs)
                    # The value of a script's variable depends on what was written before.
                    left.extend(n for n in graph.nodes[number].control if _writes_for_script(graph, n))
    arguments = {graph.nodes[n].source for n in nodes if graph.nodes[n].op == ARGUMENT}
    numbers = tuple(sorted(number for number in arguments if number is not None))
    return Tail(tuple(sorted(nodes)), tuple(cuts), numbers, results, {}, {}, shapes=shapes)


def _touched(graph: OpGraph, numbers: Iterable[int]) -> frozenset[int]:
    nodes = [graph.nodes[number] for number in numbers]
    return frozenset(
        index for node in nodes for index in node.reads + node.writes if not graph.variables[index].in_model
    )


def _writes_for_script(graph: OpGraph, number: int) -> bool:
    """Returns whether a node writes a variable of the script, such as a metric's state."""
    return any(not graph.variables[index].in_model for index in graph.nodes[number].writes)


class _Walk:
    """The way back from one result to where its tail begins."""

    def __init__(
        self,
        whole: OpGraph,
        rows: Rows,
        gradients: frozenset[Tensor],
        *,
        begins_at_model: bool,
        of_samples: bool,
        runs_layers: bool,
    ) -> None:
        self._whole = whole
        self._rows = rows
        self._gradients = gradients
        self._begins_at_model = begins_at_model
        self._of_samples = of_samples
        self._runs_layers = runs_layers
        self.used: set[Tensor] = set()
        self.nodes: set[int] = set()
        self.cuts: dict[Tensor, Cut] = {}
        self.obstacle: str | None = None

    def back_from(self, targets: Iterable[Tensor | int]) -> _Walk:
        """Goes all ways back from tensors and nodes, and stops at the first obstacle."""
        stack: list[Tensor] = []
        for target in targets:
            stack.extend(self._through(target) if isinstance(target, int) else [target])
        seen: set[Tensor] = set()
        while stack and self.obstacle is None:
            current = stack.pop()
            if current not in seen:
                seen.add(current)
                stack.extend(self._before(current))
        return self

    def _before(self, tensor: Tensor) -> Iterable[Tensor]:
        """Returns what a tensor is computed from; nothing where it is a cut or an obstacle."""
        node, content = self._whole.nodes[tensor.node], self._rows.of(tensor)
        if tensor in self._gradients:
            self.used.add(tensor)
            return ()
        if content.gradients and (node.backward or not self._gradients):
            self.obstacle = DEPENDS_ON_GRADIENTS
            return ()
        if not self._of_samples and (node.op == ARGUMENT or content.rows is not None):
            self.obstacle = OF_SAMPLES
            return ()
        of_weights_alone = content.weights and not content.samples and not content.random
        is_of_a_rank = bool(self._gradients) and (content.gradients or of_weights_alone)
        may_begin = content.weights or not self._begins_at_model
        if node.op not in SOURCES and may_begin and not is_of_a_rank and self._is_cut(tensor):
            return ()
        if node.op in RANDOM_OPS:
            self.obstacle = f"it depends on random numbers that every microbatch draws anew (op {node.name!r})"
            return ()
        if node.op == VARIABLE and content.weights and not (self._gradients and self._is_read_only(node)):
            self.obstacle = "it reads a weight of the model in another way for a batch than for a microbatch"
            return ()
        if node.call and not self._runs_layers and self._uses_weights(node):
            self.obstacle = f"a layer would have to run again for the whole batch (op {node.name!r})"
            return ()
        return self._through(tensor.node)

    def _uses_weights(self, node: Node) -> bool:
        """Returns whether a node makes something of weights and of each sample, as the layers of a model do.

        What is made of all samples together, such as their sum times a weight, is no work of a layer.
        """
        given = [(tensor, self._rows.of(tensor)) for tensor in node.inputs]
        is_of_each = any(c.samples and self._rows.differs(tensor) != () for tensor, c in given)
        return is_of_each and any(c.weights and not c.samples for _, c in given)

    def _through(self, number: int) -> list[Tensor]:
        """Notes that a node belongs to the tail, and returns what it needs."""
        found: list[Tensor] = []
        stack = [number]
        while stack:
            current = stack.pop()
            if current in self.nodes:
                continue
            self.nodes.add(current)
            node = self._whole.nodes[current]
            found.extend(node.inputs)
            # The value of a script's variable, such as a metric's state, depends on what was written before.
            stack.extend(before for before in node.control if _writes_for_script(self._whole, before))
        return found

    def _is_read_only(self, node: Node) -> bool:
        return node.source is not None and self._whole.variables[node.source].read_only

    def _is_cut(self, tensor: Tensor) -> bool:
        """Returns whether the tail can begin at a tensor. If so, the tensor is noted."""
        content, other = self._rows.of(tensor), self._rows.in_part(tensor)
        if other is None or self._whole.type_of(tensor).dtype in UNSENDABLE_DTYPES:
            return False
        if content.states:
            # Once per batch it is written, and so read, in the tail.
            return False
        if self._begins_at_model and content.rows is not None and not self._rows.has_one_row_each(tensor):
            return False
        of_weights_alone = content.weights and not content.samples and not content.random
        is_same = of_weights_alone and not self._rows.differs(tensor)
        if content.rows is None and not is_same:
            return False
        self.cuts[tensor] = Cut(tensor, other, content.rows, content.blocks if content.rows == 0 else 1)
        return True
