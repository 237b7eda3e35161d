"""The imports of smp_tf's own modules, read from the sources: nothing is imported for it."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("smp_tf", "partition", "pipeline", "ops")


@dataclasses.dataclass(frozen=True)
class Import:
    """One name that a file imports.

    Args:
        file: the file, from the root of the sources.
        line: the line of the statement.
        module: what is imported, or what it is imported from: "smp_tf.job.runtime", "tensorflow".
        is_inner: whether the statement stands in a function.
    """

    file: str
    line: int
    module: str
    is_inner: bool


def sources(root: Path = ROOT) -> dict[str, Path]:
    """Returns the files of smp_tf by the names of their modules."""
    paths = (path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py")))
    return {module_of(path.relative_to(root)): path for path in paths}


def module_of(path: Path) -> str:
    """Returns the name of the module that a file is; its path is given from the root of the sources."""
    parts = list(path.with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts if parts[0] == "smp_tf" else ["smp_tf", *parts])


def room_of(path: Path) -> str:
    """Returns the room of a file, such as "smp_tf.job"; its path is given from the root of the sources."""
    return module_of(path.parent / "__init__.py")


def imports_of(root: Path, path: Path, modules: Mapping[str, Path]) -> Iterator[Import]:
    """Yields all imports of a file, those in functions and for annotations included.

    Args:
        root: of the sources.
        path: of the file.
        modules: the own modules; `from smp_tf.job import runtime` imports one, `from smp_tf.job.runtime import current`
            imports something of one.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inner = {id(node) for function in functions for node in ast.walk(function)}
    file = path.relative_to(root).as_posix()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name if name in modules else node.module for name in names]
        else:
            continue
        for name in dict.fromkeys(found):
            yield Import(file, node.lineno, name, id(node) in inner)


def circles(uses: Mapping[str, set[str]]) -> list[list[str]]:
    """Returns what uses itself by way of others: the strongly connected parts of a graph (Tarjan, 1972).

    Args:
        uses: what each node uses.
    """
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for other in sorted(uses.get(node, ())):
            if other not in order:
                visit(other)
            if other in stack:
                lowest[node] = min(lowest[node], lowest[other])
        if lowest[node] == order[node]:
            part = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(part) > 1:
                found.append(sorted(part))

    for node in sorted(uses):
        if node not in order:
            visit(node)
    return found
