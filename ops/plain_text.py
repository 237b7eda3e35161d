"""Makes text that a terminal shows as it is, whoever wrote it."""

from __future__ import annotations

__all__ = ["plain_text"]

# Characters that a terminal obeys instead of showing them, except line ends and tabs. Escape sequences are made of
# them.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def plain_text(text: str) -> str:
    r"""Returns a text in which control characters are written as text, such as `\x1b`. Ends of lines and tabs stay.

    Args:
        text: a text, perhaps from another rank or a script.
    """
    return text.translate(_CONTROLS)
