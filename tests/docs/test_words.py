"""docs/words.md says each word once, and where it is in code."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import DOCS, ROOT, page

ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in page("docs/words.md").splitlines()
    if line.startswith("| ") and not line.startswith("| word ")
]


def test_each_word_stands_once() -> None:
    words = [word for row in ROWS for word in row[0].split(", ")]
    assert sorted({word for word in words if words.count(word) > 1}) == []
    known = {"stage", "chunk", "microbatch", "schedule", "stash", "bubble", "replica", "process set", "unit", "plan"}
    known |= {"placement", "segment", "transfer", "task", "program", "slot", "share", "layout"}
    assert known - set(words) == set()


def test_it_is_where_the_page_says() -> None:
    for word, _, *where in ROWS:
        for name, file in re.findall(r"(?:`(\w+)` in )?`([\w/]+\.py)`", where[0] if where else ""):
            code = (ROOT / file).read_text(encoding="utf-8")
            assert not name or re.search(rf"^(class {name}\b|{name}\b.* = )", code, re.MULTILINE), (word, name, file)


def test_contributors_are_led_to_it() -> None:
    assert "](docs/words.md)" in page("CONTRIBUTING.md")


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "examples/README.md", *DOCS])
def test_pages_say_after_and_next_to_and_besides(name: str) -> None:
    assert re.findall(r".*\b(?:[Bb]ehind|[Bb]eside)\b.*", page(name)) == []
