"""Every message that docs/troubleshooting.md quotes is one that the sources can print."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.docs.pages import ROOT, page

#: Stands for a value that is put into a message.
VALUE = "…"
QUOTED = [line.removeprefix("> ") for line in page("docs/troubleshooting.md").splitlines() if line.startswith("> ")]


def python_texts() -> Iterator[str]:
    for room in ("smp_tf", "partition", "pipeline", "ops", "smdistributed"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(p.value if isinstance(p, ast.Constant) else VALUE for p in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def cpp_texts() -> Iterator[str]:
    for path in (ROOT / "ops").rglob("*.cc"):
        for literals in re.findall(r'((?:"(?:[^"\\\n]|\\.)*"\s*)+)', path.read_text(encoding="utf-8")):
            yield "".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', literals))


TEXTS = [*python_texts(), *cpp_texts()]


def can_be_printed(quoted: str) -> bool:
    return any(quoted in text for text in TEXTS)


@pytest.mark.parametrize("quoted", QUOTED)
def test_the_message_exists(quoted: str) -> None:
    assert can_be_printed(quoted)


def test_what_no_source_says_is_found_out() -> None:
    assert len(QUOTED) >= 40
    assert not can_be_printed("Model … was called outside of a step")


def test_no_message_is_told_twice() -> None:
    assert len(set(QUOTED)) == len(QUOTED)
