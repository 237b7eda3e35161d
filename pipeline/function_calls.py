"""Calls of a rank's functions in the graph of a step: of a few functions, one call or more for each microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from smp_tf.ops.call import call, calls_by_name
from smp_tf.ops.graph_op import add_op
from smp_tf.partition import tf_internals
from smp_tf.partition.op_kinds import CALL_OPS
from smp_tf.pipeline.segment_function import SegmentFunction


@dataclass
class FunctionCalls:
    """The calls in one graph.

    They are made by smp_tf's own op, which costs next to nothing to add to, and to the first run of the graph; by
    TensorFlow's where XLA is to compile the function, which it does for no other, and beside a GPU or its like.
    """

    by_name: bool = field(default_factory=calls_by_name)
    _options: dict[str, bytes] = field(default_factory=tf_internals.call_options)
    #: Of each function, by its identity.
    _first: dict[int, tf.Operation] = field(default_factory=dict)

    def add(self, function: SegmentFunction, inputs: Sequence[tf.Tensor]) -> tf.Operation:
        """Call a function in the graph that is being traced.

        Args:
            function: the function.
            inputs: its arguments, without what it captures.

        Returns:
            The op, exempt from automatic control dependencies; its outputs are the function's, of unknown shapes.
        """
        first = self._first.get(id(function))
        if self.by_name and not function.compiled:
            made = call(function.function, inputs, self._options, is_first=first is None)
        else:
            made = _call_op(function.function(*inputs)) if first is None else _copy(first, inputs)
            tf_internals.run_independently(made)
        self._first.setdefault(id(function), made)
        return made


def _copy(op: tf.Operation, inputs: Sequence[tf.Tensor]) -> tf.Operation:
    """Another call of the function that an op calls, which captures the same: much quicker than to make it anew."""
    captured = list(op.inputs)[len(inputs) :]
    dtypes = [tensor.dtype for tensor in op.outputs]
    return add_op(op.graph, op.type, [*inputs, *captured], dtypes, tf_internals.attributes_of_call(op))


def _call_op(results: Any) -> tf.Operation:
    """The op of a function call that was just made: the maker of its results, or the newest op where it has none."""
    if results:
        return results[0].op
    made = reversed(tf_internals.current_graph().get_operations())
    return next(op for op in made if op.type in CALL_OPS)
