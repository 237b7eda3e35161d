"""The ways of a batch, a gradient and a checkpoint in docs/how_it_works.md name files that are there."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT, page

TITLES = ["Be a batch", "Be a gradient", "Be a checkpoint"]


def section(title: str) -> str:
    return page("docs/how_it_works.md").split(f"## {title}\n")[1].split("\n## ")[0]


def files_in(text: str) -> list[str]:
    return re.findall(r"`([\w/]+\.(?:py|cc|h))`", text)


@pytest.mark.parametrize("title", TITLES)
def test_every_file_on_the_way_exists(title: str) -> None:
    named = files_in(section(title))
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("title", TITLES)
def test_a_way_is_as_long_as_it_says(title: str) -> None:
    before, *ways = re.split(r"<!-- way: (\d+) -->\n", section(title))
    assert ways
    texts = [before, *ways[1::2]]
    for number, said, way in zip(ways[::2], texts, ways[1::2], strict=False):
        assert f" {number} files" in said
        steps = re.findall(r"^(\d+)\. `([\w/]+\.py)`", way, re.MULTILINE)
        assert [int(step) for step, _ in steps] == list(range(1, int(number) + 1))
        assert len({file for _, file in steps}) == int(number)
