"""What the package prints goes through a few files, so that no print of a search for a fault stays behind."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.house.imports import ROOT, sources

#: The files that call `print`, and why.
PRINTING = {
    "ops/build.py": "it is a command too, which says what it compiles",
    "smp_tf/training/callbacks.py": "it is a callback that prints for the script",
}


def printing(text: str) -> Iterator[int]:
    """Yields the lines that call `print`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield node.lineno


def test_what_prints_has_a_reason() -> None:
    found = {}
    for path in sources().values():
        if lines := list(printing(path.read_text())):
            found[path.relative_to(ROOT).as_posix()] = lines
    assert {path: lines for path, lines in found.items() if path not in PRINTING} == {}, "take it out, or say why"
    assert set(PRINTING) - set(found) == set(), "no longer there"


def test_a_print_is_found() -> None:
    assert list(printing('x = 1\nif x:\n    print("DBG", x)\nconsole.print(x)\n')) == [3]
