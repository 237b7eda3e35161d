"""Notes what a step takes gradients of: its losses, in the order of the calls of `tf.GradientTape.gradient`.

A trace of a whole batch that is only examined needs no backward. So gradients are placeholders then, of the types of
another trace's gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

#: The name of the placeholders of gradients.
UNKNOWN_GRADIENT = "smp_unknown_gradient"


class GradientCalls:
    """The calls of `tf.GradientTape.gradient` in one trace of a step."""

    def __init__(self) -> None:
        #: For each call, the tensors whose sum was differentiated.
        self.targets: list[list[tf.Tensor]] = []
        #: For each call and source, the gradient, perhaps a placeholder; None where there is none.
        self.gradients: list[list[Any]] = []
        #: For each call and source, the type of the gradient; None where there is none.
        self.kinds: list[list[Any]] = []
        #: For each call, what the gradients are taken by.
        self.sources: list[list[Any]] = []
        #: For each call, whether it takes the gradient of the sum of its targets.
        self.is_plain: list[bool] = []

    @contextlib.contextmanager
    def noted(self, weighed: Mapping[int, Callable[[], Sequence[tuple[str, Any]]]] | None = None) -> Iterator[None]:
        """Notes calls within its context.

        Args:
            weighed: for calls whose losses are replaced, by number: what gives names of tensors, and what each counts.
        """

        def watched(original: Callable[..., Any], tape: Any, target: Any, sources: Any, *args: Any, **more: Any) -> Any:
            make = (weighed or {}).get(len(self.targets))
            parts = make() if make is not None else None
            is_plain = not args and more.get("output_gradients") is None
            if parts is not None:
                graph = tf.compat.v1.get_default_graph()
                target = [graph.get_tensor_by_name(name) for name, _ in parts]
                more["output_gradients"] = [value for _, value in parts]
            results = original(tape, target, sources, *args, **more)
            self._note([] if parts is not None else target, sources, _flat(results), is_plain)
            return results

        with _replaced(watched):
            yield

    @contextlib.contextmanager
    def left_out(self, like: GradientCalls) -> Iterator[None]:
        """Notes calls within its context, in which gradients of variables are placeholders.

        Args:
            like: the calls of another trace of the same step. They say where there are gradients.
        """

        def watched(original: Callable[..., Any], tape: Any, target: Any, sources: Any, *args: Any, **more: Any) -> Any:
            kinds = like.kinds[len(self.targets)] if len(self.targets) < len(like.kinds) else []
            flat, is_plain = _flat(sources), not args and more.get("output_gradients") is None
            if len(flat) != len(kinds) or not all(isinstance(source, tf.Variable) for source in flat):
                results = original(tape, target, sources, *args, **more)
                self._note(target, sources, _flat(results), is_plain)
                return results
            made = [None if kind is None else _unknown(source) for source, kind in zip(flat, kinds, strict=True)]
            self._note(target, sources, made, is_plain)
            return tf.nest.pack_sequence_as(sources, made) if tf.nest.is_nested(sources) else made[0]

        with _replaced(watched):
            yield

    def forget_tensors(self) -> None:
        """Drops the tensors, and the graph with them. What is left says how gradients are replaced by placeholders."""
        self.targets, self.gradients = [], []

    def _note(self, target: Any, sources: Any, gradients: list[Any], is_plain: bool) -> None:
        self.is_plain.append(is_plain)
        self.targets.append([value for value in tf.nest.flatten(target) if isinstance(value, tf.Tensor)])
        self.sources.append(_flat(sources))
        self.gradients.append(gradients)
        self.kinds.append([None if value is None else tf.type_spec_from_value(value) for value in gradients])


def _flat(values: Any) -> list[Any]:
    return list(tf.nest.flatten(values))


def _unknown(variable: tf.Variable) -> tf.Tensor:
    return tf.compat.v1.placeholder(variable.dtype, variable.shape, name=UNKNOWN_GRADIENT)


@contextlib.contextmanager
def _replaced(watched: Callable[..., Any]) -> Iterator[None]:
    """Watches, within its context, calls that take gradients of weights and are not within another call.

    Gradients of other tensors are part of a loss, as in a gradient penalty. Calls within another call are part of
    backward.
    """
    original = tf.GradientTape.gradient
    is_inside = False

    def gradient(tape: Any, target: Any, sources: Any, *args: Any, **more: Any) -> Any:
        nonlocal is_inside
        if is_inside or not any(isinstance(source, tf.Variable) for source in _flat(sources)):
            return original(tape, target, sources, *args, **more)
        is_inside = True
        try:
            return watched(original, tape, target, sources, *args, **more)
        finally:
            is_inside = False

    tf.GradientTape.gradient = gradient
    try:
        yield
    finally:
        tf.GradientTape.gradient = original
