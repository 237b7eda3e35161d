"""What the modules of smp_tf keep between calls, written down so that two moments can be compared.

Objects that cannot change are left out; containers, instances of our classes, counters and what a thread keeps are
followed down to values, or to objects of others, which are known by their identity.
"""

from __future__ import annotations

import enum
import functools
import importlib
import itertools
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from tests.house.imports import sources

#: By the path of a value, such as "smp_tf.announce._said": what it is.
Snapshot = dict[str, Any]

_IMMUTABLE = (int, float, complex, str, bytes, bool, type(None))
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType)
_DESCRIPTORS = (property, classmethod, staticmethod, functools.cached_property, types.MemberDescriptorType)
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_LRU_CACHE = type(functools.lru_cache(len))


def import_all() -> None:
    """Imports every module of smp_tf."""
    for name in sources():
        importlib.import_module(name)


def snapshot() -> Snapshot:
    """Returns what the modules of smp_tf, and the classes in them, hold in this thread."""
    found: Snapshot = {}
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] == "smp_tf":
            for path, value in _attributes(vars(module), name):
                if getattr(value, "__module__", name) == name or not isinstance(value, type):
                    _note(found, path, value, name)
    return found


def caches() -> dict[str, int | None]:
    """Returns the functions that remember results, by their paths: how many each remembers at most."""
    return {
        f"{name}.{attribute}": value.cache_parameters()["maxsize"]
        for name, module in sys.modules.items()
        if name.partition(".")[0] == "smp_tf"
        for attribute, value in vars(module).items()
        if isinstance(value, _LRU_CACHE) and value.__module__ == name  # type: ignore[misc]
    }


def differences(before: Snapshot, after: Snapshot) -> dict[str, str]:
    """Returns what two snapshots differ in, by path, in words."""
    return {
        path: f"{before.get(path, 'nothing')} -> {after.get(path, 'nothing')}"
        for path in sorted({*before, *after})
        if before.get(path) != after.get(path)
    }


def _attributes(held: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for name, value in list(held.items()):
        if not (name.startswith("__") and name.endswith("__")) and name != "_abc_impl":
            yield f"{path}.{name}", value


def _note(found: Snapshot, path: str, value: Any, module: str) -> None:
    """Adds what a module or a class has under a name, where it can change."""
    if isinstance(value, type):
        if value.__module__ == module and not issubclass(value, enum.Enum):
            for inner, attribute in _attributes(vars(value), path):
                _note(found, inner, attribute, module)
    elif not isinstance(value, (types.ModuleType, enum.Enum, _LRU_CACHE, *_FUNCTIONS, *_DESCRIPTORS)):
        found[path] = _written(value, {})


def _written(value: Any, seen: dict[int, Any]) -> Any:
    """Returns a value as something that compares equal while the value is the same.

    Args:
        value: the value.
        seen: what was written before, by its id: it is written once, since tables hold things that hold each other.
    """
    if isinstance(value, _IMMUTABLE):
        return value
    if id(value) in seen:
        return "seen before"
    # Kept, so that nothing else gets its id meanwhile.
    seen[id(value)] = value
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, _LOCKS):
        return repr(value).split()[0]
    if isinstance(value, weakref.ref):
        return "reference", _known(value())
    if isinstance(value, (tuple, list, deque)):
        return type(value).__name__, [_written(one, seen) for one in value]
    if isinstance(value, (set, frozenset, weakref.WeakSet)):
        return type(value).__name__, sorted(repr(_written(one, seen)) for one in value)
    if isinstance(value, (Mapping, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)):
        items = [(repr(_written(key, seen)), _written(one, seen)) for key, one in list(value.items())]
        return type(value).__name__, sorted(items, key=lambda item: item[0])
    is_ours = type(value).__module__.partition(".")[0] == "smp_tf"
    if (is_ours and not isinstance(value, enum.Enum)) or isinstance(value, threading.local):
        # What an instance has none of, it has of its class.
        held = {name: default for kind in type(value).__mro__[-2::-1] for name, default in _fields(kind)}
        held |= {name: one for name in held if (one := getattr(value, name, None)) is not None}
        held |= getattr(value, "__dict__", {})
        return type(value).__name__, {name: _written(one, seen) for name, one in sorted(held.items())}
    return _known(value)


def _fields(kind: type) -> Iterator[tuple[str, Any]]:
    """Yields the fields of a class's instances that the class names, with what they are by default."""
    slots = getattr(kind, "__slots__", ())
    for name in [slots] if isinstance(slots, str) else slots:
        if name not in ("__dict__", "__weakref__"):
            yield name, None
    for name, value in vars(kind).items():
        if not (name.startswith("_") or callable(value) or isinstance(value, _DESCRIPTORS)):
            yield name, value


def _known(value: Any) -> Any:
    return type(value).__name__, None if value is None else id(value)
