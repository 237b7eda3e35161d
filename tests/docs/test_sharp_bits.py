"""Every "do not do this" of docs/sharp_bits.md fails as the page says, and every "instead, do this" runs."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tf_keras

import smp_tf as smp
from tests.docs.pages import page

INTRODUCTION, *SECTIONS = re.split(r"^## ", page("docs/sharp_bits.md"), flags=re.MULTILINE)
[GIVEN] = re.findall(r"^```python\n(.*?)^```$", INTRODUCTION, re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Code:
    """A block of a section that runs in one process, and what it raises: its type and a part of its message."""

    title: str
    source: str
    error: tuple[str, str] | None


def codes() -> Iterator[Code]:
    for section in SECTIONS:
        title = section.splitlines()[0]
        for source, error in re.findall(
            r"^```python\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", section, re.DOTALL | re.MULTILINE
        ):
            kind, _, told = error.strip().partition(": ")
            yield Code(title, source, (kind, told) if error else None)


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    smp.shutdown()
    run(GIVEN, tmp_path / "given.py", names)
    yield names
    smp.shutdown()
    tf_keras.backend.clear_session()


def run(source: str, file: Path, names: dict[str, Any]) -> None:
    """From a file, where AutoGraph finds the source of functions."""
    file.write_text(source, encoding="utf-8")
    exec(compile(source, str(file), "exec"), names)


@pytest.mark.parametrize("code", codes(), ids=lambda code: code.title)
def test_the_page_is_true(code: Code, given: dict[str, Any], tmp_path: Path) -> None:
    if code.error is None:
        run(code.source, tmp_path / "code.py", given)
        return
    kind, told = code.error
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the page says which
        run(code.source, tmp_path / "code.py", given)
    assert type(caught.value).__name__ == kind, traceback.format_exception(caught.value)
    assert told in " ".join(str(caught.value).split())


def test_every_section_says_what_to_do() -> None:
    assert len(SECTIONS) >= 15
    without = [s.splitlines()[0] for s in SECTIONS if "Do not do this" in s and "nstead, do this" not in s]
    assert without == []


def test_a_mean_of_sums_is_a_part_of_the_sum(given: dict[str, Any], tmp_path: Path) -> None:
    wrong, right = (code for code in codes() if code.title == "A step is one microbatch")
    for number, code in enumerate((wrong, right)):
        run(code.source, tmp_path / f"code_{number}.py", given)
    assert float(given["all_of_it"]) == pytest.approx(2 * float(given["half_of_it"]), rel=1e-6)
