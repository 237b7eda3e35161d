"""The page of results that `make test-all` writes."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.result_table import ResultTable, Row, cell


def test_a_cell_says_how_many_agree_and_the_largest_deviations() -> None:
    rows = [Row(0.0, 2e-13, True), Row(3.4e-16, 1e-13, True), Row(1e-3, None, False)]
    assert cell(rows) == "2 of 3, losses 1e-03, weights 2e-13"
    assert cell([Row(0.0, 0.0, True)]) == "1 of 1, losses equal, weights equal"
    assert cell([Row(None, None, False)]) == "0 of 1"


def test_the_page_has_a_row_per_model_and_a_column_per_number_of_partitions(tmp_path: Path) -> None:
    table = ResultTable(tmp_path / "page.md")
    table.add("mlp", 2, Row(0.0, 0.0, True))
    table.write(["mlp", "gpt"], [1, 2])
    lines = (tmp_path / "page.md").read_text().splitlines()
    assert lines[-4:] == [
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
    assert file.read_text().splitlines()[-5:] == [
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
    assert file.read_text().splitlines()[-1] == "| mlp | not run | 1 of 1, losses equal, weights equal |"
