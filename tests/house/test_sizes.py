"""Functions are short and take few arguments: none over 60 lines, none with more than 8 parameters or arguments."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.house.imports import ROOT, sources

#: The most lines of a function, from its `def` to its end. Its docstring and its decorators are not counted.
LINES = 60
#: The most parameters of a function, those by keyword included, `self` and `cls` not counted. Likewise the most
#: arguments of a call; the constructors of dataclasses are calls.
ARGUMENTS = 8

#: What is larger for a reason: "what file function". A call is told by the function in which it stands and by its name.
LARGE = {
    "call ops/recorder.py stop Point": "each is a field of what C++ records",
    "call partition/plan/plan.py make_plan Plan": "each is a key of the text that ranks agree on",
    "call partition/plan/plan_file.py to_store StoredPlan": "each is a key of a stored file",
    "call smp_tf/checkpoint/writing.py Writing._commit Manifest": "each is a key of a stored file",
    "call smp_tf/start/connection.py open_transport TransportOptions": "each is one option of the transport, by name",
    "parameters smp_tf/checkpoint/manager.py CheckpointManager.__init__": "public: each is one choice of the user's",
    "parameters smp_tf/optimizer/one_bit_lamb.py OneBitLAMB.__init__": "public: the hyperparameters of LAMB by name",
    "parameters smp_tf/whole_batch/decorator.py step": "public: each is one choice of the user's",
}


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Returns the names of a function's parameters, `*rest` and `**rest` included, `self` and `cls` not."""
    given = function.args
    named = [each.arg for each in (*given.posonlyargs, *given.args)]
    if named[:1] in (["self"], ["cls"]):
        named.pop(0)
    rest = [each.arg for each in (given.vararg, given.kwarg) if each is not None]
    return [*named, *(each.arg for each in given.kwonlyargs), *rest]


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Returns the lines of a function without its docstring."""
    lines = last_line(function) - function.lineno + 1
    if ast.get_docstring(function) is not None:
        lines -= last_line(function.body[0]) - function.body[0].lineno + 1
    return lines


def last_line(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno


def large_in(file: str, text: str) -> Iterator[tuple[str, str]]:
    """Yields what is too large in a file: its entry in the lists above, and what is wrong in words."""

    def visit(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            inner = name
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = f"{name}.{child.name}".lstrip(".")
                if (lines := lines_of(child)) > LINES:
                    yield f"lines {file} {inner}", f"{file}:{child.lineno}: {inner} has {lines} lines"
                if (count := len(parameters_of(child))) > ARGUMENTS:
                    yield f"parameters {file} {inner}", f"{file}:{child.lineno}: {inner} has {count} parameters"
            elif isinstance(child, ast.ClassDef):
                inner = f"{name}.{child.name}".lstrip(".")
            elif isinstance(child, ast.Call) and (count := len(child.args) + len(child.keywords)) > ARGUMENTS:
                called = ast.unparse(child.func)
                yield (
                    f"call {file} {name} {called}",
                    f"{file}:{child.lineno}: {called} is called with {count} arguments",
                )
            yield from visit(child, inner)

    yield from visit(ast.parse(text), "")


def test_functions_are_short_and_take_few_arguments() -> None:
    large: dict[str, str] = {}
    for path in sources().values():
        large.update(large_in(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")))
    listed = set(LARGE)
    assert [told for entry, told in large.items() if entry not in listed] == []
    assert sorted(listed - set(large)) == [], "these are mended: take them off the list"


def test_what_is_too_large_is_told_by_file_line_and_size() -> None:
    body = "\n".join(["        pass"] * 60)
    text = f'''
class Room:
    def first(self, a, b, /, c, *d, e, f, g, h, **i):
        """Says something.

        More of it.
        """
{body}

def second(a, b, c, d, e, f, g, h):
    """Says something."""
    return Value(a, b, c, d, e, f, g, h, i=1)
'''
    assert list(large_in("room.py", text)) == [
        ("lines room.py Room.first", "room.py:3: Room.first has 61 lines"),
        ("parameters room.py Room.first", "room.py:3: Room.first has 9 parameters"),
        ("call room.py second Value", "room.py:71: Value is called with 9 arguments"),
    ]
