"""The parts of pages of a plan or a timeline: one self-contained HTML document, tables and pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from smp_tf.pipeline.programs.kinds import KINDS
from smp_tf.pipeline.task import Kind

#: Pixels of a picture's width, and of the space before its rows.
WIDTH, LEFT = 1100, 70

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; } th, td { padding: .25em .8em; border-bottom: 1px solid #ddd; text-align: right; }
.wide { overflow-x: auto; } svg { font: 11px system-ui, sans-serif; }
.mark { display: inline-block; width: .9em; height: .9em; margin-right: .4em; vertical-align: -.1em; }
"""


def document(title: str, body: Iterable[str], style: str = "") -> str:
    """Returns a whole page.

    Args:
        title: of it, as text.
        body: pieces of HTML.
        style: rules of style besides those of all pages.
    """
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}{style}</style></head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def items(lines: Iterable[str]) -> str:
    """Returns a list of texts."""
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], names_at: int | None = None) -> str:
    """Returns a table.

    Args:
        heads: heads of the columns. Like all cells they are HTML.
        rows: cells.
        names_at: the column that holds names. They are left-aligned and may be long.
    """

    def cells(kind: str, row: Sequence[str]) -> str:
        styles = [" class=name" if at == names_at else "" for at in range(len(row))]
        return "".join(f"<{kind}{style}>{cell}</{kind}>" for style, cell in zip(styles, row, strict=True))

    lines = [f"<tr>{cells('td', row)}</tr>" for row in rows]
    return f"<table><thead><tr>{cells('th', heads)}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def mark(color: str, name: str = "") -> str:
    """Returns a small square of a colour, perhaps with its own style."""
    return f'<span class="mark {name}" style="background: {color}"></span>'


def legend(there: Iterable[Kind]) -> str:
    """Returns a legend for the colours of the given tasks."""
    there = set(there)
    shown = [(row.color, row.words) for kind, row in KINDS.items() if kind in there]
    return " ".join(f"{mark(color)}{words}" for color, words in shown if color is not None)


def svg(width: float, height: float, shapes: Iterable[str]) -> str:
    """Returns a picture of a given size."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">{"".join(shapes)}</svg>'
    )
