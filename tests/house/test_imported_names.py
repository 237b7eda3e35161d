"""What tests, benchmarks, examples and scripts import from smp_tf is there, also where only long tests would notice.

mypy says so of smp_tf itself.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.house.imports import ROOT, sources

FOLDERS = ("tests", "benchmarks", "examples", "docs", "smdistributed", "tools")
_IMPORT = re.compile(r"^\s*from (smp_tf\.[\w.]+) import (\([^)]*\)|[^\n#]+)", re.MULTILINE)


def imported_in(text: str) -> Iterator[tuple[str, str]]:
    """Yields what a file imports from modules of smp_tf: the module, and the name."""
    for found in _IMPORT.finditer(text):
        for name in found[2].strip("()").split(","):
            if name.strip():
                yield found[1], name.split(" as ")[0].strip()


def defined_in(tree: ast.Module) -> set[str]:
    """Returns the names that a module has."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return found


def test_what_is_imported_from_smp_tf_is_there() -> None:
    modules = sources()
    # A public name may be that of a room, too.
    wanted = {
        (path, module, name)
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for module, name in imported_in(path.read_text(encoding="utf-8"))
        if f"{module}.{name}" not in modules
    }
    known = {
        module: defined_in(ast.parse(modules[module].read_text(encoding="utf-8")))
        for module in {module for _, module, _ in wanted}
        if module in modules
    }
    told = [
        f"{path.relative_to(ROOT)} imports {name} from {module}, which has no such name"
        for path, module, name in sorted(wanted)
        if name not in known.get(module, set())
    ]
    assert told == []


def test_imports_are_found() -> None:
    text = """
from smp_tf.job import runtime
from smp_tf.errors import (
    StepError,
    ConfigError as Wrong,
)
    from smp_tf.version import __version__  # within a function
"""
    assert list(imported_in(text)) == [
        ("smp_tf.job", "runtime"),
        ("smp_tf.errors", "StepError"),
        ("smp_tf.errors", "ConfigError"),
        ("smp_tf.version", "__version__"),
    ]
