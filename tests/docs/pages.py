"""The pages of the documentation, as text."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Every page of docs/, by its path from the root.
DOCS = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))


def page(name: str = "README.md") -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(language: str, text: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
