"""Which files of smp_tf's a call comes through, and which of them are given a tensor, as Python's profiler sees it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

ROOT = Path(__file__).parents[1]
ROOMS = tuple(f"{ROOT}/{name}/" for name in ("ops", "partition", "pipeline", "smp_tf"))
#: How deep a tensor may be in what a function is given: in lists, dictionaries and objects of smp_tf's.
_DEPTH = 3


def files_of(call: Callable[[], Any]) -> list[str]:
    """Returns the files whose functions a call runs, in the order in which it comes to them."""
    files: dict[str, None] = {}

    def note(frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOMS):
            files[frame.f_code.co_filename.removeprefix(f"{ROOT}/")] = None

    _profiled(note, call)
    return list(files)


class HandedTensors:
    """The tensors that functions of smp_tf's were given, or returned, while something was called."""

    def __init__(self) -> None:
        # With the tensors themselves: as long as they are there, no other has the same id.
        self._found: list[tuple[str, dict[int, tf.Tensor]]] = []

    def during(self, call: Callable[[], Any]) -> Any:
        """Calls something, and returns what it returns."""

        def note(frame: Any, event: str, argument: object) -> None:
            code = frame.f_code
            if event not in ("call", "return") or not code.co_filename.startswith(ROOMS):
                return
            count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
            arguments = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
            sys.setprofile(None)
            tensors = {id(t): t for value in ([argument] if event == "return" else arguments) for t in _tensors(value)}
            sys.setprofile(note)
            if tensors:
                self._found.append((code.co_filename.removeprefix(f"{ROOT}/"), tensors))

        return _profiled(note, call)

    def files_with(self, tensors: Collection[tf.Tensor]) -> list[str]:
        """Returns the files with a function that was given one of the tensors, or returned it, in their order."""
        wanted = set(map(id, tensors))
        return list(dict.fromkeys(file for file, found in self._found if not wanted.isdisjoint(found)))


def followed(gradient: tf.Tensor) -> list[tf.Tensor]:
    """Returns a gradient, what it is made of and what is made of it, op by op, as far as type and shape are its own."""
    found = {id(gradient): gradient}

    def take(tensors: Collection[tf.Tensor]) -> list[tf.Tensor]:
        alike = [t for t in tensors if t.dtype == gradient.dtype and t.shape == gradient.shape]
        new = {id(t): t for t in alike if id(t) not in found and t.op.type not in ("Const", "Placeholder")}
        found.update(new)
        return list(new.values())

    before, after = [gradient], [gradient]
    while before:
        before += take(before.pop().op.inputs)
    while after:
        after += [made for reader in after.pop().consumers() for made in take(reader.outputs)]
    return list(found.values())


def _tensors(value: Any, depth: int = 0) -> Iterator[tf.Tensor]:
    if isinstance(value, tf.Tensor):
        yield value
    elif depth < _DEPTH:
        items: Collection[Any] = value if isinstance(value, (list, tuple)) else ()
        if isinstance(value, dict):
            items = value.values()
        elif type(value).__module__.startswith("smp_tf.") and depth < _DEPTH - 1:
            items = list(getattr(value, "__dict__", {}).values())
        for item in items:
            yield from _tensors(item, depth + 1)


def _profiled(note: Callable[[Any, str, object], None], call: Callable[[], Any]) -> Any:
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        return call()
    finally:
        sys.setprofile(before)
