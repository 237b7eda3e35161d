"""The pictures of terminals: what a command leaves on one."""

from __future__ import annotations

import html
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"


@pytest.fixture(scope="module")
def draw_terminal() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PICTURES))
        return importlib.import_module("draw_terminal")


def lines_of(picture: Path) -> list[str]:
    """Returns the lines of text in a picture."""
    found: dict[float, str] = {}
    for y, text in re.findall(r'<text[^>]* y="([\d.]+)"[^>]*>(.*?)</text>', picture.read_text(encoding="utf-8")):
        found[float(y)] = found.get(float(y), "") + html.unescape(text)
    return [" ".join(found[y].split()) for y in sorted(found)]


def test_what_was_erased_is_not_drawn(draw_terminal: ModuleType, tmp_path: Path) -> None:
    script = (
        "print('half\\rwhole'); print('\\x1b[31mred\\x1b[0m')\n"
        "print('I0000 00:00:1.1    1 port.cc:1] oneDNN custom operations are on. ')\n"
        "print('working ...\\n\\x1b[?25h\\r\\x1b[1A\\x1b[2Kdone')\n"
    )
    command, picture = [sys.executable, "-c", script], tmp_path / "picture.svg"
    draw_terminal.draw(["a", "b c"], draw_terminal.printed(command), picture)
    assert lines_of(picture) == ["$ a 'b c'", "whole", "red", "done"]
    # It loads nothing from elsewhere.
    assert re.findall(r"https?://[^\s\"]+", picture.read_text(encoding="utf-8")) == ["http://www.w3.org/2000/svg"]


def test_the_demo_is_what_readme_shows() -> None:
    [command] = re.findall(r"^DEMO := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    lines = lines_of(PICTURES / "terminal_run.svg")
    assert lines[0] == f"$ {command}"
    # It fits on a screen.
    assert len(lines) <= 45
    assert "docs/pictures/terminal_run.svg" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_failure_ends_in_its_block() -> None:
    words = [line.strip("│ ") for line in lines_of(PICTURES / "terminal_failure.svg")[-6:]]
    assert [line.split()[0] for line in words[1:-1]] == ["who", "where", "why", "what"]
