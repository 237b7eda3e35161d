"""Imports TensorFlow in two thirds of the time, which tests do in hundreds of processes.

Python looks for garbage again and again while an import makes a million objects, none of which is garbage, and once
more among them at the process's end. So it does while a step is traced, and most of what that makes stays.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

#: Begins the code of a process that finds the packages of this repository.
CODE = "from tests import quick_import; quick_import.install()\n"


class _Finder:
    """Finds TensorFlow, once; no garbage is looked for while it is imported, nor later among what the import made."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "tensorflow":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            gc.disable()
            try:
                execute(module)
            finally:
                gc.freeze()
                gc.enable()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def look_for_garbage_seldom() -> None:
    """For a process that traces many steps; in the tests it grew by a tenth, of what nobody needs any more."""
    gc.set_threshold(100_000, 20, 100)


def install() -> None:
    """Makes the process's import of TensorFlow quick, whenever it comes."""
    if "tensorflow" not in sys.modules:
        sys.meta_path.insert(0, _Finder())
