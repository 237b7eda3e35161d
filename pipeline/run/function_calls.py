"""Calls a rank's functions in the graph of a step. There are few functions, with calls for each microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from smp_tf.ops.call import call, calls_by_name
from smp_tf.ops.graph_op import add_op, run_independently
from smp_tf.partition import tf_internals
from smp_tf.partition.graph.op_kinds import CALL_OPS
from smp_tf.pipeline.run.segment_function import SegmentFunction


@dataclass
class FunctionCalls:
    """The calls in one graph.

    smp_tf's own op makes them. It costs next to nothing, in the graph and in its first run. TensorFlow's op makes them
    where XLA compiles the function, since XLA does so for no other op, and where there is a GPU or the like.
    """

    by_name: bool = field(default_factory=calls_by_name)
    _options: dict[str, bytes] = field(default_factory=tf_internals.call_options)
    #: Functions that have a call by name, and TensorFlow's first calls of the others, by the function's identity.
    _named: set[int] = field(default_factory=set)
    _first: dict[int, _Call] = field(default_factory=dict)

    def add(self, function: SegmentFunction, inputs: Sequence[tf.Tensor]) -> tf.Operation:
        """Calls a function in the graph that is being traced.

        Args:
            function: the function.
            inputs: its arguments, without what it captures.

        Returns:
            The op, exempt from automatic control dependencies. Its outputs are the function's, with unknown shapes.
        """
        key = id(function)
        if self.by_name and not function.compiled:
            made = call(function.function, inputs, self._options, is_first=key not in self._named)
            self._named.add(key)
            return made
        if key in self._first:
            made = self._first[key].again(inputs)
        else:
            made = _call_op(function.function(*inputs))
            self._first[key] = _Call(made, tf_internals.attributes_of_call(made))
        run_independently(made)
        return made


@dataclass(frozen=True)
class _Call:
    """A call of a function in the graph, to be copied for similar calls, since a copy is much quicker to make."""

    op: tf.Operation
    attributes: Mapping[str, Any]

    def again(self, inputs: Sequence[tf.Tensor]) -> tf.Operation:
        """Returns the function's call for other arguments. What it captures stays."""
        captured = list(self.op.inputs)[len(inputs) :]
        dtypes = [tensor.dtype for tensor in self.op.outputs]
        return add_op(self.op.graph, self.op.type, [*inputs, *captured], dtypes, self.attributes)


def _call_op(results: Any) -> tf.Operation:
    """Returns the op of a function call that was just made: its results' maker, or the newest op."""
    if results:
        return results[0].op
    made = reversed(tf_internals.current_graph().get_operations())
    return next(op for op in made if op.type in CALL_OPS)
