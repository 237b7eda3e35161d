"""Measure the units of a step: each runs as a stage of its own, forward and backward, one after the other.

    unit      0        1        2
    sweep 0   F 1.2 ─▶ F 3.4 ─▶ F 0.3 ─┐      milliseconds
    sweep 1   B 2.0 ◀─ B 6.9 ◀─ B 0.6 ◀┘

What flows between them is real, made from an example batch; the weights are not, and a unit's are freed before the next
unit's are made. A tensor is freed when its last reader is done.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from smp_tf.partition.op_graph import ARGUMENT, CAPTURE, VARIABLE, OpGraph, Tensor
from smp_tf.partition.split import Segment, Split
from smp_tf.pipeline.segment_function import SegmentFunction, build_segment_function

# Seconds of calls that a unit's time is the median of, and the most calls that take.
_ENOUGH = 0.05
_MOST_CALLS = 20


def profile(
    split: Split,
    arguments: Sequence[tf.Tensor],
    captures: Sequence[tf.Tensor],
    own: Mapping[int, tf.Variable],
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> dict[tuple[int, int], float]:
    """Run every segment of a step by itself and say how long it takes.

    Args:
        split: the step, cut into as many stages as there are units to measure.
        arguments: values of the step's tensor arguments, composite ones in parts.
        captures: the outside tensors it captures, by their number.
        own: variables that are used as they are, by index; others get values of their own for the time of a segment.
        progress: told how many segments are done, of how many.

    Returns:
        Seconds by (stage, sweep): the median over some calls after a first one, without the time that calling any
        function takes.
    """
    order = sorted(split.segments, key=lambda at: (at[1], at[0] if at[1] % 2 == 0 else -at[0]))
    wanted = Counter(t for segment in split.segments.values() for t in segment.inputs)
    values: dict[Tensor, tf.Tensor] = {}
    overhead = _median(tf.function(lambda: [tf.constant(0)]).get_concrete_function())[0]
    found = {}
    for done, at in enumerate(order):
        segment = split.segments[at]
        seconds, outputs = _run(split.graph, segment, values, arguments, captures, own)
        found[at] = max(0.0, seconds - overhead)
        values.update((tensor, value) for tensor, value in outputs if wanted[tensor])
        for tensor in segment.inputs:
            wanted[tensor] -= 1
            if not wanted[tensor]:
                del values[tensor]
        progress(done + 1, len(order))
    return found


def _run(
    graph: OpGraph,
    segment: Segment,
    values: Mapping[Tensor, tf.Tensor],
    arguments: Sequence[tf.Tensor],
    captures: Sequence[tf.Tensor],
    own: Mapping[int, tf.Variable],
) -> tuple[float, Iterator[tuple[Tensor, tf.Tensor]]]:
    used = {v for n in segment.sources if graph.nodes[n].op == VARIABLE and (v := graph.nodes[n].source) is not None}
    variables = {v: own[v] if v in own else _variable(graph, v) for v in used}
    function = build_segment_function(graph, segment, variables)
    given = [*_given(graph, function, values, arguments, captures)]
    given += [tf.convert_to_tensor(own[v]) if v in own else _value(graph, v) for v in function.remote_values]
    seconds, outputs = _median(function.function, *given)
    return seconds, zip(function.outputs, outputs, strict=True)


def _given(
    graph: OpGraph,
    function: SegmentFunction,
    values: Mapping[Tensor, tf.Tensor],
    arguments: Sequence[tf.Tensor],
    captures: Sequence[tf.Tensor],
) -> Iterator[tf.Tensor]:
    for tensor in function.arguments:
        node = graph.nodes[tensor.node]
        if node.op == ARGUMENT:
            assert node.source is not None
            yield arguments[node.source]
        elif node.op == CAPTURE:
            assert node.source is not None
            yield captures[node.source]
        elif tensor in values:
            yield values[tensor]
        else:
            # The seed of random ops.
            kind = graph.type_of(tensor)
            yield tf.zeros(kind.shape, kind.dtype)


def _value(graph: OpGraph, variable: int) -> tf.Tensor:
    """Some value of a variable: small and positive, so that nothing becomes too large, or slow as denormals are."""
    kind = graph.variables[variable].type
    dtype = tf.dtypes.as_dtype(kind.dtype)
    return tf.fill(kind.shape, tf.constant(0.05 if dtype.is_floating else 0, dtype))


def _variable(graph: OpGraph, variable: int) -> tf.Variable:
    return tf.Variable(_value(graph, variable), trainable=False)


def _median(function: Callable[..., Any], *given: tf.Tensor) -> tuple[float, Sequence[tf.Tensor]]:
    """Seconds of a call, and what it returned."""
    outputs = function(*given)  # the first call also optimises the function
    _finish(outputs)
    taken: list[float] = []
    while len(taken) < 3 or (sum(taken) < _ENOUGH and len(taken) < _MOST_CALLS):
        began = time.perf_counter()
        _finish(function(*given))
        taken.append(time.perf_counter() - began)
    return statistics.median(taken), outputs


def _finish(outputs: Sequence[tf.Tensor]) -> None:
    """Wait until tensors are there; on a GPU a function returns earlier."""
    numbers = [tensor for tensor in outputs if tensor.dtype not in (tf.variant, tf.resource)]
    for tensor in numbers[-1:]:
        tensor.numpy()
