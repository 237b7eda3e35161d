"""Every "do not do this" of docs/sharp_bits.md fails as the page says, and every "instead, do this" runs."""

from __future__ import annotations

import json
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


def codes(language: str = "python") -> Iterator[Code]:
    """The blocks of "python" run in one process and in two; what "py" shows goes wrong in two only."""
    block = rf"^```{language}\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?"
    for section in SECTIONS:
        title = section.splitlines()[0]
        for source, error in re.findall(block, section, re.DOTALL | re.MULTILINE):
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


ON_EVERY_RANK = """
import json, os, sys
from pathlib import Path

folder, GIVEN, codes = json.loads(Path(sys.argv[1]).read_text())
os.chdir(folder)


def run(name, source, names):
    file = Path(folder) / f"{name}.py"
    exec(compile(source, str(file), "exec"), names)


for number, source in enumerate(codes):
    names = {}
    run("given", GIVEN, names)
    try:
        run(f"code_{number}", source, names)
        raised = ""
    except Exception as error:
        raised = f"{type(error).__name__}: {' '.join(str(error).split())}"
    print("told " + json.dumps([number, raised]))
    names["smp"].shutdown()
"""


@pytest.mark.distributed
@pytest.mark.full
def test_the_page_is_true_of_two_ranks(tmp_path: Path) -> None:
    from tests.distributed.harness import launch_script

    [differs, alone, _] = codes("py")
    assert "save_model" in alone.source  # rank 0 waits until the other one has ended
    found = [*codes(), differs]
    given = GIVEN.replace('"microbatches": 2', '"partitions": 2, "microbatches": 2')
    for name, source in {"given": given, **{f"code_{n}": code.source for n, code in enumerate(found)}}.items():
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
    (tmp_path / "codes.json").write_text(json.dumps([str(tmp_path), given, [code.source for code in found]]))
    (tmp_path / "main.py").write_text(ON_EVERY_RANK, encoding="utf-8")
    outcome = launch_script(2, tmp_path / "main.py", [str(tmp_path / "codes.json")]).expect_clean()
    for rank in (0, 1):
        told = dict(json.loads(line) for line in re.findall(r"^told (.*)$", outcome.output(rank), re.MULTILINE))
        assert sorted(told) == list(range(len(found)))
        for number, code in enumerate(found):
            kind, words = code.error or ("", "")
            assert told[number].startswith(kind), (rank, code.title, told[number])
            assert words in told[number], (rank, code.title, told[number])
            assert bool(told[number]) == bool(code.error), (rank, code.title, told[number])
