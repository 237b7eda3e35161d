"""What is cleverer than Python's usual ways stands in few files, behind a function that says why.

Closures of other people's functions, code objects, and the class of an object that exists.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.house.imports import ROOT, sources

#: What is so, and why.
CLEVER = {
    "smp_tf/__init__.py __class__": "a package named like a public name would hide it; Python's way for modules",
    "smp_tf/tf_internals.py __class__": "`turn_into`: the script holds the variable already",
    "smp_tf/tf_internals.py __closure__": "`replace_global_norm`: the script may hold the function already",
    "smp_tf/tf_internals.py __code__": "`replace_global_norm`",
    "smp_tf/tf_internals.py cell_contents": "`replace_global_norm`",
}


def clever_in(text: str) -> Iterator[str]:
    """Yields what is clever in a file."""
    for node in ast.walk(ast.parse(text)):
        named = [node.attr] if isinstance(node, ast.Attribute) else []
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = [node.value]
        for name in named:
            if name in ("cell_contents", "__code__", "__closure__"):
                yield name
        if isinstance(node, ast.Attribute) and node.attr == "__class__" and isinstance(node.ctx, ast.Store):
            yield node.attr


def test_what_is_clever_has_a_reason() -> None:
    found = {
        f"{path.relative_to(ROOT)} {name}"
        for path in sources().values()
        for name in clever_in(path.read_text(encoding="utf-8"))
    }
    assert sorted(found - set(CLEVER)) == [], "find another way, or put it behind a function that says why"
    assert sorted(set(CLEVER) - found) == []


def test_what_is_clever_is_found() -> None:
    text = """
kind = value.__class__
value.__class__ = Other
function.__closure__[0].cell_contents = 3
code = getattr(function, "__code__")
"""
    assert sorted(clever_in(text)) == ["__class__", "__closure__", "__code__", "cell_contents"]
