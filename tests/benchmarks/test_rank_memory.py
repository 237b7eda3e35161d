"""What a rank's memory is made of."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

MIB = 2**20
#: What a rank says, in MiB.
SAID = {"weights": 17, "slots": 1, "tensors_peak": 60, "c_heap": 50, "c_heap_free": 40, "python": 20, "files": 15}
RANK = {name: count * MIB for name, count in {**SAID, "shared": 1, "resident": 180, "peak": 200}.items()}


def test_the_parts_together_are_the_peak() -> None:
    from rank_memory import shared_out

    parts = {name: count // MIB for name, count in shared_out(RANK).items()}
    assert parts == {
        "weights": 17, "slots": 1, "large": 42, "c_heap": 50, "python": 20, "files": 15, "shared": 1, "rest": 54,
    }  # fmt: skip
    assert sum(parts.values()) == 200


def test_every_rank_has_a_column() -> None:
    from rank_memory import table_of

    text = io.StringIO()
    ranks = [{**RANK, "graphs": 1, "ops": 1779}, {**RANK, "graphs": 2, "ops": 1361}]
    Console(file=text, width=160).print(table_of(ranks, "GPT"))
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.getvalue().splitlines() if "│" in line]
    assert ["at most in a step", "200", "200"] in lines
    assert ["between steps, without files and shared memory", "164", "164"] in lines
    assert lines[-1] == ["graphs that Python holds (ops)", "1 (1,779)", "2 (1,361)"]


def test_options_that_make_no_sense_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from rank_memory import arguments

    with pytest.raises(SystemExit):
        arguments(["--processes", "1"])
    assert "--processes is 2 or more, and --steps 1 or more. Received: 1, 3" in capsys.readouterr().err
