"""Tells what the tensors of a step are made of whose batches are not cut: its one microbatch is the whole batch.

Every tensor is that of the whole batch as it is. So what is computed once per batch can begin at any of them.
"""

from __future__ import annotations

from functools import cached_property

from smp_tf.partition.graph.op_graph import ARGUMENT, OpGraph, Tensor
from smp_tf.partition.graph.op_kinds import RANDOM_OPS
from smp_tf.partition.samples.sample_rows import Content, SampleRows


class OneMicrobatch:
    """The contents of the tensors of a step's graph for a batch that is one microbatch.

    Args:
        rows: what the tensors are made of by the two traces of the step.
        whole: the graph for the batch.
    """

    def __init__(self, rows: SampleRows, whole: OpGraph) -> None:
        self._rows = rows
        self._whole = whole

    def of(self, tensor: Tensor) -> Content:
        """Returns what a tensor is made of. What depends on samples counts as a row, however many there are."""
        return self._contents[tensor.node]

    def in_part(self, tensor: Tensor) -> Tensor | None:
        """Returns the tensor of the microbatch's graph that is made at the same place; None where there is none."""
        return self._rows.in_part(tensor)

    def differs(self, tensor: Tensor) -> tuple[int, ...] | None:
        """Returns no dimension: all lengths are those of the microbatch."""
        return ()

    def has_one_row_each(self, tensor: Tensor) -> bool:
        """Returns that a tensor has a row for each sample: what depends on samples counts as one."""
        return True

    @cached_property
    def _contents(self) -> list[Content]:
        found: list[Content] = []
        for number, node in enumerate(self._whole.nodes):
            known = self._rows.of(Tensor(number, 0)) if node.outputs else Content()
            given = (found[tensor.node].samples for tensor in node.inputs)
            samples = node.op == ARGUMENT or node.op in RANDOM_OPS or any(given)
            rows = 0 if samples and not known.gradients else None
            found.append(Content(rows, samples, known.weights, known.gradients, states=known.states))
        return found
