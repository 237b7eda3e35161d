"""Finds in which layer call, and in which direction, every op of a trace was made."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from smp_tf.partition.trace.trace import GradientFunctionSpan, Trace


@dataclasses.dataclass(frozen=True)
class Directions:
    """In which call, and in which direction, every op was made.

    Args:
        call_of: for each op, its layer call.
        is_backward: for each op, whether it was made while gradients were taken.
        forward_of: for each op, the number of the forward op whose gradient function made it; None where none did, or
            where nothing tells which.
    """

    call_of: Sequence[int]
    is_backward: Sequence[bool]
    forward_of: Sequence[int | None]


def directions_of(trace: Trace, operations: Sequence[tf.Operation]) -> Directions:
    """Returns in which call and direction the ops of a trace were made.

    Args:
        trace: what `trace` gave.
        operations: the ops of the trace.
    """
    recorder, length = trace.recorder, len(operations)
    call_of = _paint(recorder.call_spans, length, lambda i: recorder.call_spans[i].call, 0)
    is_backward = _paint(recorder.backward_spans, length, lambda i: True, False)
    # Gradient functions are noted when they end: inner ones (a tape inside a custom gradient) first.
    function_spans = sorted(recorder.function_spans, key=lambda span: (span.start, -span.end))
    forward_op = _ForwardOps(operations, call_of, is_backward)
    differentiated = [forward_op.find(span) for span in function_spans]
    return Directions(call_of, is_backward, _paint(function_spans, length, lambda i: differentiated[i], None))


def _paint(spans: Sequence[Any], length: int, value: Callable[[int], Any], initial: Any) -> list[Any]:
    """Returns, for each op number, the value of the innermost span around it. Outer spans come first."""
    found = [initial] * length
    for index, span in enumerate(spans):
        if span.end > span.start:
            found[span.start : span.end] = [value(index)] * (span.end - span.start)
    return found


class _ForwardOps:
    """Finds the forward op that a gradient function was called for."""

    def __init__(self, operations: Sequence[tf.Operation], call_of: Sequence[int], is_backward: Sequence[bool]) -> None:
        self._number = {op.name: number for number, op in enumerate(operations)}
        self._graph = operations[0].graph if operations else None
        self._in_scope: dict[tuple[str, str], list[int]] = defaultdict(list)
        for number, op in enumerate(operations):
            if not is_backward[number]:
                # A scope that was opened for only one op gives the op its own name.
                for scope in (op.name.rpartition("/")[0], op.name):
                    self._in_scope[scope, op.type].append(number)

    def find(self, span: GradientFunctionSpan) -> int | None:
        """Returns the number of the forward op, or None where nothing tells.

        An output of the op says it exactly. Where the gradient function needs no outputs, it is the op that reads all
        inputs still known. Where it needs no inputs either, it is the only op of that type in the name scope.
        """
        for tensor in span.outputs:
            if self._here(tensor):
                return self._number[tensor.op.name]
        candidates: list[int] | None = None
        for position, tensor in enumerate(span.inputs):
            if not self._here(tensor):
                continue
            readers = [
                self._number[op.name]
                for op in tensor.consumers()
                if op.type == span.op_type and position < len(op.inputs) and op.inputs[position] is tensor
            ]
            candidates = readers if candidates is None else [n for n in candidates if n in readers]
        candidates = [n for n in candidates or () if n < span.start]
        in_scope = [n for n in self._in_scope.get((span.scope, span.op_type), ()) if n < span.start]
        both = [n for n in candidates if n in in_scope]
        for choice in (both, candidates, in_scope):
            if len(choice) == 1:
                return choice[0]
        return None

    def _here(self, tensor: Any) -> bool:
        return getattr(tensor, "graph", None) is not None and tensor.graph is self._graph
