"""What README.md says is so: its script prints what it shows, and it leads to every page and every example."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import smp_tf
from tests.distributed.harness import ONE_THREAD, Outcome, launch_script
from tests.docs.pages import DOCS, ROOT, blocks, page

PAGES = ("README.md", "CONTRIBUTING.md")
GUIDES = ("docs/coming_from_smp.md", "docs/coming_from_horovod.md")
SAVED = '"digits_model"'


def script(folder: Path) -> Path:
    """README's script, saving in another folder."""
    text = blocks("python", page())[0]
    assert text.count(SAVED) == 1
    path = folder / "train.py"
    path.write_text(text.replace(SAVED, repr(str(folder / "saved"))), encoding="utf-8")
    return path


def script_with_a_loop(folder: Path) -> Path:
    """README's script, but for `compile` and `fit`, which the loop that is shown takes the place of."""
    text, loop = blocks("python", page())
    kept = text[: text.index("model.compile(")]
    assert "model.fit(" not in kept
    path = folder / "loop.py"
    path.write_text(kept + loop, encoding="utf-8")
    return path


def lines_that_start(outcome: Outcome, rank: int, start: str) -> list[str]:
    return [line for line in outcome.output(rank).splitlines() if line.startswith(start)]


def losses_in(text: str) -> list[str]:
    """What Keras says of its epochs, but for the seconds."""
    return re.findall(r" - loss: \d\S* - accuracy: \d\S*", text)


@pytest.mark.distributed
def test_the_script_runs_and_prints_what_is_shown(tmp_path: Path) -> None:
    path = script(tmp_path)
    split = launch_script(2, path, environment=ONE_THREAD).expect_clean()
    shown = next(block for block in blocks("text", page()) if "2 partitions" in block)
    # Keras says that an epoch begins, and then the plan is made.
    table = shown[shown.index("2 partitions") : shown.index("15/15")]
    assert table in split.output(0) + "\n"
    losses = losses_in(split.output(0))
    assert len(losses) == 10
    # The first epoch and the last are shown.
    assert losses_in(shown) == [losses[0], losses[-1]]
    assert losses_in(split.output(1)) == []
    assert (tmp_path / "saved" / "saved_model.pb").is_file()

    whole = launch_script(1, path, environment=ONE_THREAD, launched=False).expect_clean()
    assert losses_in(whole.output(0)) == losses


@pytest.mark.distributed
def test_the_loop_runs_in_place_of_fit(tmp_path: Path) -> None:
    path = script_with_a_loop(tmp_path)
    split = launch_script(2, path, environment=ONE_THREAD).expect_clean()
    losses = lines_that_start(split, 0, "step ")
    assert len(losses) == 4
    assert lines_that_start(split, 1, "step ") == []
    whole = launch_script(1, path, environment=ONE_THREAD, launched=False).expect_clean()
    assert lines_that_start(whole, 0, "step ") == losses


def test_it_is_short_and_leads_to_every_page() -> None:
    assert len(page().splitlines()) <= 126
    # The index and the changelog are pages of the site alone.
    assert [name for name in DOCS if f"]({name})" not in page()] == ["docs/changelog.md", "docs/index.md"]


def test_every_example_is_in_the_list_of_examples() -> None:
    """With what it shows, and a command that starts it."""
    listed = re.findall(
        r"^\| \[(\w+)\.py\]\(\1\.py\) \| .+ \| `(?:horovodrun -np \d )?python examples/\1\.py[^`]*` \|$",
        page("examples/README.md"),
        re.MULTILINE,
    )
    assert len(listed) == len(set(listed))
    assert set(listed) == {path.stem for path in (ROOT / "examples").glob("*.py")}


def test_no_page_includes_the_readme() -> None:
    assert [name for name in DOCS if "README.md" in page(name)] == []


@pytest.mark.parametrize("name", [*PAGES, *DOCS])
def test_every_link_leads_to_a_file(name: str) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page(name))
    assert links or name not in PAGES
    folder = (ROOT / name).parent
    assert [link for link in links if "://" not in link and not (folder / link).exists()] == []


@pytest.mark.parametrize("name", GUIDES)
def test_guides_are_linked_and_their_code_is_python_that_uses_public_names(name: str) -> None:
    assert f"]({name})" in page()
    before, after = blocks("python", page(name))
    for code in (before, after):
        compile(code, name, "exec")
    names = {used for text in re.findall(r"`([^`]+)`", page(name)) for used in re.findall(r"\bsmp\.(\w+)", text)}
    names |= set(re.findall(r"\bsmp\.(\w+)", after))
    assert {"init", "step"} <= names
    assert names <= {*smp_tf.__all__, "core", "utils"}


@pytest.mark.parametrize("name", PAGES)
def test_every_make_command_exists(name: str) -> None:
    rules = set(re.findall(r"^([a-z-]+):", page("Makefile"), re.MULTILINE))
    said = set(re.findall(r"(?:`|^ {4})(?:\w+=\S+ )?make ([a-z-]+)", page(name), re.MULTILINE))
    assert {"test"} <= said <= rules
