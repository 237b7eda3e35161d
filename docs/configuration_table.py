"""Makes the table of keys in configuration.md from the keys themselves.

python docs/configuration_table.py     # writes it anew
"""

from __future__ import annotations

import re
from pathlib import Path

from smp_tf.config.keys import ALIASES, KEYS, Key

PAGE = Path(__file__).with_name("configuration.md")
BEGIN, END = "<!-- keys: begin -->\n", "<!-- keys: end -->\n"


def table() -> str:
    """Returns the table of all keys, in Markdown."""
    lines = ["| key | default | takes | sets |", "|---|---|---|---|"]
    for name, key in KEYS.items():
        default, meaning = default_and_meaning(key)
        others = [f"`{alias}`" for alias, meant in ALIASES.items() if meant == name]
        if others:
            meaning += f". Also {', '.join(others)}"
        lines.append(f"| `{name}` | {default} | {marked(key.allowed)} | {marked(meaning)} |")
    return "\n".join(lines) + "\n"


def default_and_meaning(key: Key) -> tuple[str, str]:
    """Tells a default that depends on other things from what the key sets."""
    told = re.fullmatch(r"(.*) \(default: (.*)\)", key.meaning)
    if told:
        return marked(told[2]), told[1]
    if key.default is None:
        return "none", key.meaning
    return f'`"{key.default}"`' if isinstance(key.default, str) else f"`{key.default}`", key.meaning


def marked(text: str) -> str:
    """Returns text with keys and values written as code."""
    names = "|".join(name for name in KEYS if "_" in name)
    return re.sub(rf'"[^"]*"|\bsmp\.\w+|\b(?:{names})\b', r"`\g<0>`", text).replace("|", r"\|")


def written(page: str) -> str:
    """Returns the page with the table of today in it."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
