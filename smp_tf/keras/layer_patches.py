"""Changes Keras's layers and metrics, which note where they are constructed, and hold values from the start."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from smp_tf.keras import adapter, placed_layers
from smp_tf.keras.patch import Patch


class ConstructionPatch(Patch):
    """Makes layers remember under which `smp.partition`, if any, they were constructed."""

    def _replace(self) -> None:
        for owner, name in adapter.layers().constructors():
            self._wrap(owner, name, _noted_construction)


class StatePatch(Patch):
    """Makes metrics, and layers that adapt to data, hold their values from the start.

    A metric's variables belong to the script, on every rank, even where a distributed model makes the metric. A layer
    that adapts runs its own functions over its variables, while the model is constructed or before its first step.

    Args:
        made_at_once: returns a context in which models make variables with their values.
        fill: gives a variable its initial value now, where it belongs to a model and has none.
    """

    def __init__(
        self, made_at_once: Callable[[], contextlib.AbstractContextManager[None]], fill: Callable[[Any], None]
    ) -> None:
        super().__init__()
        self._made_at_once = made_at_once
        self._fill = fill

    def _replace(self) -> None:
        for owner, name in adapter.layers().makers_of_read_variables():
            self._wrap(owner, name, self._at_once)
        for owner, name in adapter.layers().adapting_methods():
            self._wrap(owner, name, self._adapted)

    def _at_once(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def made(owner: Any, *args: Any, **kwargs: Any) -> Any:
            with self._made_at_once():
                return original(owner, *args, **kwargs)

        return made

    def _adapted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def adapt(layer: Any, *args: Any, **kwargs: Any) -> Any:
            for variable in adapter.layers().variables_of(layer):
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
