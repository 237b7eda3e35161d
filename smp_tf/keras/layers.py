"""Changes Keras's layers and metrics: tags calls, and holds values from the start. For tf_keras."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tf_keras

from smp_tf.keras import placed_layers
from smp_tf.keras.layer_variables import Lookup, variables_of
from smp_tf.keras.patch import Patch
from smp_tf.partition.trace.trace import Recorder


@contextlib.contextmanager
def tag_layer_calls(
    recorder: Recorder,
    is_model: Callable[[Any], bool],
    around: Callable[[Any], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Iterator[None]:
    """Announces to the recorder, within its context, the call of every layer that a distributed model calls.

    Args:
        recorder: what to announce calls to.
        is_model: whether a layer is a distributed model; calls outside any such model are not announced.
        around: given a layer that is called outside any such model, the context to call it in, which may announce the
            call of the model that the layer is part of.
    """
    original = tf_keras.layers.Layer.__call__

    @functools.wraps(original)
    def tagged(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if not (recorder.in_call or is_model(layer)):
            with around(layer):
                return tagged(layer, *args, **kwargs) if recorder.in_call else original(layer, *args, **kwargs)
        stage = placed_layers.stage_of(layer)
        with recorder.call(layer.name, type(layer).__name__, stage):
            return original(layer, *args, **kwargs)

    tf_keras.layers.Layer.__call__ = tagged
    try:
        yield
    finally:
        tf_keras.layers.Layer.__call__ = original


class ConstructionPatch(Patch):
    """Makes layers remember under which `smp.partition`, if any, they were constructed."""

    def _replace(self) -> None:
        self._wrap(tf_keras.layers.Layer, "__init__", _noted_construction)


class StatePatch(Patch):
    """Makes metrics, and layers that adapt to data, hold their values from the start.

    A metric's variables belong to the script, on every rank, also where a distributed model makes the metric. A layer
    that adapts runs functions of its own over its variables, while the model is constructed or before its first step.

    Args:
        made_at_once: gives a context in which models make variables with their value.
        fill: gives a variable its initial value now, where it belongs to a model and has none.
    """

    def __init__(
        self, made_at_once: Callable[[], contextlib.AbstractContextManager[None]], fill: Callable[[Any], None]
    ) -> None:
        super().__init__()
        self._made_at_once = made_at_once
        self._fill = fill

    def _replace(self) -> None:
        self._wrap(tf_keras.metrics.Metric, "add_weight", self._at_once)
        self._wrap(tf_keras.layers.experimental.preprocessing.PreprocessingLayer, "adapt", self._adapted)
        # They read what they have just made.
        self._wrap(tf_keras.layers.Normalization, "build", self._at_once)
        self._wrap(Lookup, "__init__", self._at_once)

    def _at_once(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def made(owner: Any, *args: Any, **kwargs: Any) -> Any:
            with self._made_at_once():
                return original(owner, *args, **kwargs)

        return made

    def _adapted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def adapt(layer: Any, *args: Any, **kwargs: Any) -> Any:
            for variable in variables_of(layer):
                self._fill(variable)
            with self._made_at_once():
                return original(layer, *args, **kwargs)

        return adapt


#: In force from the first `smp.partition` until `smp.shutdown`.
construction_patch = ConstructionPatch()


def _noted_construction(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(layer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(layer, *args, **kwargs)
        placed_layers.note_construction(layer)

    return __init__
