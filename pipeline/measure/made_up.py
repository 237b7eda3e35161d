"""Values for what a unit takes from the rest of the step, so that it can run by itself.

    numbers of known shape                              made up
    indices, masks, shapes; what has no known shape     computed from made-up numbers, by the ops that lead to them
    arguments, captured tensors                         real

An index has to lie in its table, and a shape has to be a shape. So these are computed as in the step: from the last
numbers that crossed from one unit to another on the way.

    embedding ─▶ block ─▶│ router ─▶ argmax ─▶│ expert
                         │  computed          │ asks for the expert's number
                  made up here
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from smp_tf.partition.graph.op_graph import ARGUMENT, CAPTURE, SEED, SOURCES, VARIABLE, OpGraph, Tensor, TensorType
from smp_tf.partition.split.assign import Role
from smp_tf.partition.split.split import Segment, Split, Visit
from smp_tf.pipeline.run.segment_function import SegmentFunction, build_segment_function

_SEED = (17, 29)
#: Types for which TensorFlow draws random numbers.
_DRAWN = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


@dataclass(frozen=True)
class Surroundings:
    """What a step is given from outside.

    Args:
        arguments: values of the step's tensor arguments, composite ones in parts.
        captures: the outside tensors that the step captures, by their number.
        own: variables that are used as they are, by index. Others get made-up values.
    """

    arguments: Sequence[tf.Tensor]
    captures: Sequence[tf.Tensor]
    own: Mapping[int, tf.Variable]

    def variables_of(self, graph: OpGraph, segment: Segment) -> dict[int, tf.Variable]:
        """Returns the variables whose handles a segment uses: existing ones, and new ones."""
        used = {
            v for n in segment.sources if graph.nodes[n].op == VARIABLE and (v := graph.nodes[n].source) is not None
        }
        return {v: self.own[v] if v in self.own else tf.Variable(weight(graph, v), trainable=False) for v in used}

    def given_to(
        self, graph: OpGraph, function: SegmentFunction, values: Mapping[Tensor, tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns the arguments to call a segment's function with.

        Args:
            graph: the op graph.
            function: of the segment.
            values: of the segment's inputs.
        """
        given = [self._value(graph, tensor, values) for tensor in function.takes.arguments]
        remote = function.takes.remote_values
        return given + [tf.convert_to_tensor(self.own[v]) if v in self.own else weight(graph, v) for v in remote]

    def _value(self, graph: OpGraph, tensor: Tensor, values: Mapping[Tensor, tf.Tensor]) -> tf.Tensor:
        node = graph.nodes[tensor.node]
        if node.op == SEED:
            return tf.zeros(node.outputs[0].shape, node.outputs[0].dtype)
        if node.op not in (ARGUMENT, CAPTURE):
            return values[tensor]
        assert node.source is not None
        return self.arguments[node.source] if node.op == ARGUMENT else self.captures[node.source]


def values_for(split: Split, wanted: Collection[Tensor], around: Surroundings) -> dict[Tensor, tf.Tensor]:
    """Returns values for tensors that other units make.

    Args:
        split: the step, cut into as many stages as there are units.
        wanted: tensors that none of the units at hand makes.
        around: what the step is given from outside.

    Returns:
        A value for each.
    """
    values = {t: numbers(split.graph.type_of(t)) for t in wanted if _can_be_made_up(split.graph.type_of(t))}
    others = tuple(sorted(set(wanted) - values.keys()))
    return {**values, **_computed(split, others, around)} if others else values


def numbers(kind: TensorType) -> tf.Tensor:
    """Returns random numbers of a type between 0 and 1, so that nothing becomes too large, or slow as denormals are."""
    dtype = tf.dtypes.as_dtype(kind.dtype)
    made = tf.random.stateless_uniform(kind.shape, _SEED, 0.05, 0.95, dtype.real_dtype)
    return tf.complex(made, made) if dtype.is_complex else made


def weight(graph: OpGraph, variable: int) -> tf.Tensor:
    """Returns some small and positive value for a variable, for the same reasons."""
    kind = graph.variables[variable].type
    dtype = tf.dtypes.as_dtype(kind.dtype)
    return tf.fill(kind.shape, tf.constant(0.05 if dtype.is_floating else 0, dtype))


def _can_be_made_up(kind: TensorType) -> bool:
    return kind.is_static and tf.dtypes.as_dtype(kind.dtype).real_dtype in _DRAWN


def _computed(split: Split, wanted: tuple[Tensor, ...], around: Surroundings) -> dict[Tensor, tf.Tensor]:
    graph, segment = split.graph, _leading_to(split, wanted)
    function = build_segment_function(graph, segment, around.variables_of(graph, segment))
    values = {tensor: numbers(graph.type_of(tensor)) for tensor in segment.inputs}
    found = function.function(*around.given_to(graph, function, values))
    return dict(zip(function.outputs, found, strict=True))


def _leading_to(split: Split, wanted: tuple[Tensor, ...]) -> Segment:
    """Returns the ops that compute tensors from the last numbers that crossed between units."""
    graph, places = split.graph, split.assignment.places
    nodes: set[int] = set()
    sources: set[int] = set()
    inputs: set[Tensor] = set()
    stack = [tensor.node for tensor in wanted]
    while stack:
        number = stack.pop()
        if number in nodes:
            continue
        nodes.add(number)
        for tensor in graph.nodes[number].inputs:
            before, here = places[tensor.node], places[number]
            crosses = before.role is here.role is Role.HOME and before.chunk != here.chunk
            if graph.nodes[tensor.node].op in SOURCES:
                sources.add(tensor.node)
            elif crosses and _can_be_made_up(graph.type_of(tensor)):
                inputs.add(tensor)
            else:
                stack.append(tensor.node)
    return Segment(
        Visit(0, 0),
        nodes=tuple(sorted(nodes)),
        sources=tuple(sorted(sources)),
        inputs=tuple(sorted(inputs)),
        remote_values=(),
        outputs=wanted,
    )
