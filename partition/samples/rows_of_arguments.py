"""Where a step holds samples as its arguments alone tell, without a second trace.

It is for a step whose every output holds samples, such as a prediction.
"""

from __future__ import annotations

from collections.abc import Mapping

from smp_tf.partition.graph.op_graph import ARGUMENT, OpGraph, Tensor
from smp_tf.partition.samples.sample_rows import Content


class RowsOfArguments:
    """What is known of the tensors of a step that is traced once, for some samples.

    Args:
        graph: the step.
        axes: for each argument, the axis along which it has a row for each sample; None where it has none.
        samples: the number of samples.
    """

    def __init__(self, graph: OpGraph, axes: Mapping[int, int | None], samples: int) -> None:
        #: The number of samples.
        self.samples = samples
        self._graph = graph
        self._axes = axes

    def of(self, tensor: Tensor) -> Content:
        """Returns what a tensor is made of. Whatever is no argument counts as a row."""
        if self._graph.nodes[tensor.node].op != ARGUMENT:
            return Content(rows=0, samples=True)
        axis = self.axis_of_samples(tensor)
        return Content(rows=axis, samples=axis is not None)

    def axis_of_samples(self, tensor: Tensor) -> int | None:
        """Returns the axis along which an argument holds samples; None for any other tensor."""
        node = self._graph.nodes[tensor.node]
        return self._axes.get(node.source) if node.op == ARGUMENT and node.source is not None else None

    def is_constant(self, tensor: Tensor) -> bool:
        """Returns False: one trace does not tell what follows the number of samples."""
        return False

    def in_part(self, tensor: Tensor) -> Tensor | None:
        """Returns None: there is no other trace."""
        return None
