"""The page of results that `make test-all` writes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.distributed.result_table import ResultTable, Row, cell

AGREES = Row(0.0, 0.0, True)


def table_of(page: Path) -> list[str]:
    """The rows of the table, its head included."""
    return [line for line in page.read_text().splitlines() if line.startswith("|")]


def notes_of(page: Path) -> list[str]:
    """What the page says its cells were made from."""
    return page.read_text().partition("The cells were made from:\n\n")[2].splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder of sources, with one commit."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "step.py").write_text("first")
    (folder / "page.md").write_text("")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    commit(folder)
    return folder


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder, with nobody's settings."""
    settings = {"user.name": "a", "user.email": "a@b", "core.hooksPath": "none", "commit.gpgSign": "false"}
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    command = ["git", "-C", str(folder), *options, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def commit(folder: Path) -> str:
    """Commit all changes; the start of the commit's name."""
    git(folder, "commit", "--quiet", "--allow-empty", "--all", "--message", "a change")
    return git(folder, "rev-parse", "HEAD")[:10]


def test_a_cell_says_how_many_agree_and_the_largest_deviations() -> None:
    rows = [Row(0.0, 2e-13, True), Row(3.4e-16, 1e-13, True), Row(1e-3, None, False)]
    assert cell(rows) == "2 of 3, losses 1e-03, weights 2e-13"
    assert cell([Row(0.0, 0.0, True)]) == "1 of 1, losses equal, weights equal"
    assert cell([Row(None, None, False)]) == "0 of 1"


def test_the_page_has_a_row_per_model_and_a_column_per_number_of_partitions(tmp_path: Path) -> None:
    table = ResultTable(tmp_path / "page.md")
    table.add("mlp", 2, Row(0.0, 0.0, True))
    table.write(["mlp", "gpt"], [1, 2])
    assert table_of(tmp_path / "page.md") == [
        "| model | P = 1 | P = 2 |",
        "|---|---|---|",
        "| mlp | not run | 1 of 1, losses equal, weights equal |",
        "| gpt | not run | not run |",
    ]


def test_a_run_of_some_settings_keeps_the_cells_of_the_others(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    first = ResultTable(file)
    first.add("mlp", 1, Row(0.0, 0.0, True))
    first.add("mlp", 2, Row(0.0, None, False))
    first.write(["mlp", "gpt"], [1, 2])
    second = ResultTable(file)
    second.add("mlp", 2, Row(0.0, 0.0, True))
    second.add("gpt", 2, Row(0.0, 0.0, True))
    second.write(["gpt", "mlp", "cnn"], [1, 2, 3])
    assert table_of(file) == [
        "| model | P = 1 | P = 2 | P = 3 |",
        "|---|---|---|---|",
        "| gpt | not run | 1 of 1, losses equal, weights equal | not run |",
        "| mlp | 1 of 1, losses equal, weights equal | 1 of 1, losses equal, weights equal | not run |",
        "| cnn | not run | not run | not run |",
    ]


def test_a_page_made_with_other_versions_gives_no_cells(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    first = ResultTable(file)
    first.add("mlp", 1, Row(0.0, 0.0, True))
    first.write(["mlp"], [1])
    file.write_text(file.read_text().replace("Python 3.", "Python 2."))
    second = ResultTable(file)
    second.add("mlp", 2, Row(0.0, 0.0, True))
    second.write(["mlp"], [1, 2])
    assert table_of(file)[-1] == "| mlp | not run | 1 of 1, losses equal, weights equal |"


def test_notes_say_from_which_commit_and_when_the_cells_were_made(checkout: Path) -> None:
    file = checkout / "page.md"
    before = git(checkout, "rev-parse", "HEAD")[:10]
    first = ResultTable(file, checkout)
    for model in ("mlp", "gpt"):
        for partitions in (1, 2):
            first.add(model, partitions, AGREES)
    first.write(["mlp", "gpt", "cnn"], [1, 2])
    assert notes_of(file) == [f"- commit {before} on {first.date}: mlp, gpt"]

    after = commit(checkout)
    second = ResultTable(file, checkout)
    second.add("gpt", 2, AGREES)
    second.add("cnn", 1, AGREES)
    second.write(["mlp", "gpt", "cnn"], [1, 2])
    notes = [
        f"- commit {before} on {first.date}: mlp, gpt (P = 1)",
        f"- commit {after} on {first.date}: gpt (P = 2), cnn (P = 1)",
    ]
    assert notes_of(file) == notes

    # A run of nothing keeps them, also where the page has another column.
    ResultTable(file, checkout).write(["mlp", "gpt", "cnn"], [1, 2, 3])
    assert notes_of(file) == [notes[0].replace("mlp,", "mlp (P = 1, P = 2),"), notes[1]]


def test_notes_say_that_sources_were_changed_and_the_page_is_none_of_them(checkout: Path) -> None:
    file, name = checkout / "page.md", git(checkout, "rev-parse", "HEAD")[:10]
    file.write_text("the page of a run before")
    clean = ResultTable(file, checkout)
    (checkout / "step.py").write_text("second")
    changed = ResultTable(file, checkout)
    changed.add("mlp", 1, AGREES)
    changed.write(["mlp"], [1])
    assert notes_of(file) == [f"- commit {name} with changes that were not committed on {clean.date}: mlp"]

    clean.add("mlp", 1, AGREES)
    now = commit(checkout)
    clean.write(["mlp"], [1])
    assert notes_of(file) == [f"- commit {name} on {clean.date}, which had become commit {now} at the end: mlp"]


def test_notes_say_that_sources_are_no_checkout(checkout: Path) -> None:
    # As a copy inside a checkout of something else.
    copy = checkout / "copy"
    copy.mkdir()
    table = ResultTable(copy / "page.md", copy)
    table.add("mlp", 1, AGREES)
    table.write(["mlp"], [1])
    assert notes_of(copy / "page.md") == [f"- sources outside a git checkout on {table.date}: mlp"]


def test_cells_of_a_page_without_notes_were_made_from_a_commit_that_was_not_noted(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    table = ResultTable(file, tmp_path)
    table.add("mlp", 1, AGREES)
    table.write(["mlp"], [1])
    file.write_text(file.read_text().partition("The cells were made from:")[0])
    ResultTable(file, tmp_path).write(["mlp"], [1, 2])
    assert table_of(file)[-1] == "| mlp | 1 of 1, losses equal, weights equal | not run |"
    assert notes_of(file) == ["- a commit that was not noted: mlp (P = 1)"]
