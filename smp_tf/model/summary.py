"""`model.summary()`: Keras's table with one more column for the ranks that store each layer's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from smp_tf.job import runtime
from smp_tf.keras import adapter
from smp_tf.variables.fetch import WRITER
from smp_tf.variables.models import SplitModel

_TITLE = "Rank"
_HEADER = "Layer (type)"
_BETWEEN = "  "


def print_summary(model: SplitModel, print_fn: Callable[[str], Any] | None, options: dict[str, Any]) -> None:
    """Prints the summary of a model, on rank 0 only, unless the script takes the lines itself.

    Args:
        model: a distributed model that is built.
        print_fn: called with every line; by default they go to standard output.
        options: further arguments of `tf_keras.Model.summary`.
    """
    shown = model._smp_keras_model
    lines = adapter.archives().summary(shown, options)
    say = print_fn or print
    if print_fn is None and runtime.current().topology.rank != WRITER:
        return
    for line in _with_column(model, shown, lines):
        say(line)


def _with_column(model: SplitModel, shown: Any, lines: list[str]) -> Iterator[str]:
    width = max(map(len, lines[1:3]))
    ranks = {id(layer): _ranks(model, layer) for layer in _layers(shown)}
    column = max(len(_TITLE), *map(len, ranks.values())) if ranks else len(_TITLE)
    left = list(_layers(shown))
    in_table = False
    for line in lines:
        if line and not line.strip("_=|"):
            yield line + line[-1] * (column + len(_BETWEEN)) if len(line) == width else line
            in_table = in_table or line[0] == "="
        elif line.strip().startswith(_HEADER):
            yield f"{line:<{width}}{_BETWEEN}{_TITLE}"
        else:
            number = _place(line, left) if in_table else None
            if number is None:
                yield line
                continue
            yield f"{line:<{width}}{_BETWEEN}{ranks[id(left[number])]}".rstrip()
            del left[: number + 1]
    if "?" in ranks.values():
        yield "Which rank stores a layer is decided at the first step."


def _layers(model: Any) -> Iterator[Any]:
    """Yields the layers in the order in which Keras prints them, those of nested models after the model."""
    for layer in model.layers:
        yield layer
        if getattr(layer, "layers", None):
            yield from _layers(layer)


def _place(line: str, layers: list[Any]) -> int | None:
    """Returns the layer whose first line a line is. Keras breaks long names over several lines."""
    field = line.strip("| ").split("  ")[0]
    for number, layer in enumerate(layers):
        words = f"{layer.name} ({type(layer).__name__})"
        if field and words.startswith(field) and (field.startswith(layer.name[:10]) or field == words):
            return number
    return None


def _ranks(model: SplitModel, layer: Any) -> str:
    """Returns the ranks that store a layer's weights, over all replicas; "?" before this is decided."""
    mesh = runtime.current().topology.mesh
    layouts = []
    for variable in adapter.layers().variables_of(layer):
        if model._smp_store.leaves_to_script(variable):
            continue
        state = model._smp_store.state(variable)
        if state is None or state.owner is None:
            return "?"
        layouts.append(state.storage.layout)
    places = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    found = [rank for rank, place in enumerate(places) if any(layout.is_here(place) for layout in layouts)]
    return ", ".join(map(str, found))
