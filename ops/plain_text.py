"""Text that a terminal shows as it stands, whoever wrote it."""

from __future__ import annotations

__all__ = ["plain_text"]

# What a terminal obeys in place of showing it, but for a line's end and a tab; escape sequences are made of these.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def plain_text(text: str) -> str:
    r"""Returns a text in which control characters are written as text, such as `\x1b`. Ends of lines and tabs stay.

    Args:
        text: may come from another rank, or from a script.
    """
    return text.translate(_CONTROLS)
