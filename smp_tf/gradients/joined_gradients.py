"""Finds an optimizer's own code that computes something from the gradients of several weights.

Each rank gives an optimizer the gradients of the weights that it updates. A result made from one gradient is what one
process computes. A result made from several, such as a norm, would be another number on each stage:

    apply_gradients of the script's own      ops of one gradient             right
                                             tf.linalg.global_norm           right: it sees all stages
                                             an op of two gradients          told
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from smp_tf.gradients.other_training import report

#: Ops whose bodies are functions.
_WITH_BODIES = frozenset({"If", "StatelessIf", "Case", "StatelessCase", "While", "StatelessWhile"})


class _Watch(threading.local):
    """What is known of the optimizer's code that runs; nothing outside of it."""

    graph: Any = None
    #: The number of ops in the graph when the code handed its gradients on to Keras's own method.
    end: int | None = None
    #: Ranges of ops that see all stages.
    allowed: list[range] | None = None


_watch = _Watch()


@contextlib.contextmanager
def watching(optimizer: Any, pairs: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Watches what an optimizer's own code makes of gradients within its context, and checks it at the end.

    Args:
        optimizer: the optimizer.
        pairs: gradients and variables that its code is given on this rank.

    Raises:
        StepError: the code makes something of several gradients together.
    """
    if tf.executing_eagerly() or _watch.graph is not None:
        yield
        return
    with noting() as made:
        yield
    _look_at(optimizer, pairs, made)


@contextlib.contextmanager
def noting() -> Iterator[list[tf.Operation]]:
    """Notes the ops that an optimizer's own code makes within its context; the list is filled at its end.

    Those are left out that are combined over the stages, and those that come after the code has handed its gradients
    on to Keras's own method.
    """
    graph = tf.compat.v1.get_default_graph()
    start, made = len(graph.get_operations()), list[tf.Operation]()
    _watch.graph, _watch.end, _watch.allowed = graph, None, []
    try:
        yield made
        operations = graph.get_operations()
        end = len(operations) if _watch.end is None else _watch.end
        allowed = {number for numbers in _watch.allowed for number in numbers}
        made += [operations[number] for number in range(start, end) if number not in allowed]
    finally:
        _watch.graph = _watch.end = _watch.allowed = None


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """Lets ops join gradients within its context, since their results are combined over the stages."""
    graph = tf.compat.v1.get_default_graph()
    if _watch.allowed is None or graph is not _watch.graph:
        yield
        return
    start = len(graph.get_operations())
    yield
    _watch.allowed.append(range(start, len(graph.get_operations())))


def handed_on() -> None:
    """Notes that the optimizer's own code hands its gradients on to Keras's own method."""
    if _watch.graph is not None and _watch.end is None and tf.compat.v1.get_default_graph() is _watch.graph:
        _watch.end = len(_watch.graph.get_operations())


def _look_at(optimizer: Any, pairs: Sequence[tuple[Any, Any]], made: Sequence[Any]) -> None:
    """Raises an error where an op joins several gradients."""
    found = first_joined([gradient for gradient, _ in pairs], made)
    if found is None:
        return
    names, kind = [variable.name for _, variable in pairs], type(optimizer).__name__
    report(
        f"The apply_gradients that the script has for {kind} makes something else of the gradients of one rank than of "
        f"all",
        [
            f"Its op {found.op.name!r} ({found.op.type}) takes those of {names[found.one]!r} and "
            f"{names[found.other]!r}, and each rank gives it those of the weights that it updates alone. For a norm of "
            f"all take tf.linalg.global_norm, or clip with tf.clip_by_global_norm or the optimizer's global_clipnorm: "
            f"these see all ranks."
        ],
        "train with one partition and without shard_optimizer_state",
    )


class Joined(NamedTuple):
    """An op that joins several gradients.

    Args:
        op: the op.
        one: the place of the first of them in the list.
        other: the place of the second.
    """

    op: tf.Operation
    one: int
    other: int


def first_joined(gradients: Sequence[Any], made: Sequence[tf.Operation]) -> Joined | None:
    """Returns the first op that makes something of several gradients; None where there is none.

    Args:
        gradients: the gradients, or None.
        made: the ops.
    """
    sources: dict[str, frozenset[int]] = {}
    for number, gradient in enumerate(gradients):
        if gradient is not None:
            values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
            sources[values.name] = frozenset([number])
    for operation in made:
        if operation.type == "IdentityN" or "Call" in operation.type or operation.type in _WITH_BODIES:
            # Each output belongs to an input. What a function's body joins is not looked at.
            if len(operation.outputs) <= len(operation.inputs):
                of_inputs = [sources.get(tensor.name) for tensor in operation.inputs]
                of_outputs = of_inputs[len(of_inputs) - len(operation.outputs) :]
                pairs_of = zip(operation.outputs, of_outputs, strict=True)
                sources.update((output.name, found) for output, found in pairs_of if found is not None)
            continue
        found = frozenset().union(*(sources.get(tensor.name, frozenset()) for tensor in operation.inputs))
        if len(found) > 1 and operation.outputs:
            one, other, *_ = sorted(found)
            return Joined(operation, one, other)
        sources.update((tensor.name, found) for tensor in operation.outputs)
    return None
