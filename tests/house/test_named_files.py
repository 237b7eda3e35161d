"""Files that comments and docstrings of the sources name are there."""

from __future__ import annotations

import re
from pathlib import Path

from tests.house.imports import ROOT, sources
from tests.house.test_docstrings import prose

NAMED = re.compile(r"(?<![\w/.-])((?:[a-z_]+/)*[a-z_]+\.py)\b")
#: Names of scripts of a user's that stand for any.
OF_USERS = {"data.py", "large.py", "model.py", "script.py", "train.py", "types.py"}


def named_in(text: str) -> list[str]:
    return [name for name in NAMED.findall(text) if name not in OF_USERS]


def test_every_file_that_is_named_is_there() -> None:
    there = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("*/**/*.py") if ".venv" not in path.parts]
    ends = {"/".join(Path(name).parts[-count:]) for name in there for count in range(1, 6)}
    told = [
        f"{path.relative_to(ROOT)}:{line}: there is no {name}"
        for path in sources().values()
        for line, text in prose(path.read_text(encoding="utf-8"))
        for name in named_in(text)
        if name not in ends
    ]
    assert told == []


def test_a_name_is_found_with_its_folders() -> None:
    assert named_in("see `watch/replicas.py`, x.py2 and train.py") == ["watch/replicas.py"]
