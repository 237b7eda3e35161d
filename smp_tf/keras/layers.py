"""What smp_tf does to Keras's layers and metrics: tag calls, and hold values from the start. For tf_keras."""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tf_keras

from smp_tf.job import runtime
from smp_tf.keras.layer_variables import Lookup, variables_of
from smp_tf.model import manual_placement
from smp_tf.partition.trace.trace import Recorder
from smp_tf.variables import guarded as guarded_variables
from smp_tf.variables import store as variables


@contextlib.contextmanager
def tag_layer_calls(
    recorder: Recorder,
    is_model: Callable[[Any], bool],
    around: Callable[[Any], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Iterator[None]:
    """Within this context, every layer called by a distributed model announces its call to the recorder.

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
        stage = manual_placement.stage_of(layer)
        with recorder.call(layer.name, type(layer).__name__, stage):
            return original(layer, *args, **kwargs)

    tf_keras.layers.Layer.__call__ = tagged
    try:
        yield
    finally:
        tf_keras.layers.Layer.__call__ = original


#: Stands for an attribute that was not there.
_NOTHING = object()


class Patch(abc.ABC):
    """Methods of Keras's classes replaced by ours, from `install` until `remove`."""

    def __init__(self) -> None:
        # By class and name: what stood there, or that nothing did.
        self._originals: list[tuple[Any, str, Any]] = []

    def install(self) -> bool:
        """Put ours in place. Doing it twice is doing it once.

        Returns:
            Whether they were not in place before.
        """
        if self._originals:
            return False
        self._replace()
        return True

    def remove(self) -> None:
        """Put Keras's own back."""
        for owner, name, original in reversed(self._originals):
            if original is _NOTHING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._originals.clear()

    @abc.abstractmethod
    def _replace(self) -> None:
        """Put ours in place, by `_wrap`."""

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        original = owner.__dict__[name]
        self._originals.append((owner, name, original))
        setattr(owner, name, functools.wraps(original)(wrapper(original)))

    def _add(self, owner: type, name: str, value: Any) -> None:
        """Give a class an attribute that Keras's does not define itself."""
        if name not in owner.__dict__:
            self._originals.append((owner, name, _NOTHING))
            setattr(owner, name, value)


class ConstructionPatch(Patch):
    """Makes layers remember under which `smp.partition`, if any, they were constructed."""

    def _replace(self) -> None:
        self._wrap(tf_keras.layers.Layer, "__init__", _noted_construction)


class StatePatch(Patch):
    """Makes metrics, and layers that adapt to data, hold their values from the start.

    A metric's variables belong to the script, on every rank, also where a distributed model makes the metric. A layer
    that adapts runs functions of its own over its variables, while the model is constructed or before its first step.
    """

    def _replace(self) -> None:
        self._wrap(tf_keras.metrics.Metric, "add_weight", _at_once)
        self._wrap(tf_keras.layers.experimental.preprocessing.PreprocessingLayer, "adapt", _adapted)
        # They read what they have just made.
        self._wrap(tf_keras.layers.Normalization, "build", _at_once)
        self._wrap(Lookup, "__init__", _at_once)


#: In force from the first `smp.partition` until `smp.shutdown`.
construction_patch = ConstructionPatch()

#: In force from the first distributed model until `smp.shutdown`.
state_patch = StatePatch()


def _noted_construction(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(layer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(layer, *args, **kwargs)
        manual_placement.note_construction(layer)

    return __init__


def _at_once(original: Callable[..., Any]) -> Callable[..., Any]:
    def made(owner: Any, *args: Any, **kwargs: Any) -> Any:
        with guarded_variables.made_at_once():
            return original(owner, *args, **kwargs)

    return made


def _adapted(original: Callable[..., Any]) -> Callable[..., Any]:
    def adapt(layer: Any, *args: Any, **kwargs: Any) -> Any:
        for variable in variables_of(layer):
            store = variables.store_of(variable)
            if store is not None:
                store.fill(variable, runtime.current().seed)
        with guarded_variables.made_at_once():
            return original(layer, *args, **kwargs)

    return adapt
