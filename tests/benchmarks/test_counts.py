"""What a start and a step do is counted and compared with what is kept: no change makes them dearer unseen."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from tests.benchmarks.conftest import BENCHMARKS
from tests.distributed.harness import launch_script
from tests.full_only import params


@pytest.fixture
def kept() -> dict[str, Any]:
    return json.loads((BENCHMARKS / "counts.json").read_text())  # type: ignore[no-any-return]


def changed(kept: dict[str, Any], setting: str, **values: float) -> dict[str, Any]:
    counts = copy.deepcopy(kept["counts"])
    counts[setting].update({name.replace("_", " "): value for name, value in values.items()})
    return counts


def test_what_is_kept_neither_differs_from_itself_nor_grows(kept: dict[str, Any]) -> None:
    from counts import CALLS, PROGRAM, SETTINGS, of_change, of_growth

    assert len(kept["counts"]) == len(SETTINGS)
    assert all(set(told) == {*CALLS, *PROGRAM} for told in kept["counts"].values())
    assert list(of_growth(kept["counts"])) == []
    assert list(of_change(kept["counts"], kept)) == []


def test_the_page_has_the_counts_that_are_kept(kept: dict[str, Any]) -> None:
    """Its table was that of some changes before."""
    from counts import PROGRAM

    page = (BENCHMARKS.parent / "docs" / "speed.md").read_text(encoding="utf-8")
    for setting, of in kept["counts"].items():
        cells = [f"{of['our calls']:,}", f"{of['all calls']:.2f} × plain", *(f"{of[name]:,}" for name in PROGRAM)]
        assert f"| {setting} | {' | '.join(cells)} |" in page


def test_more_and_less_are_told(kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import counts

    monkeypatch.setattr(counts, "versions", lambda: kept["versions"])
    setting = "2 layers, 8 microbatches"
    then = kept["counts"][setting]
    more = changed(kept, setting, messages=then["messages"] + 4, our_calls=round(then["our calls"] * 1.019))
    [said] = counts.of_change(more, kept)
    share = 4 / then["messages"]
    assert (
        said == f"{setting}: messages are {then['messages'] + 4:,}, and {then['messages']:,} are kept ({share:+.1%})."
    )
    [said] = counts.of_change(changed(kept, setting, our_calls=then["our calls"] // 2), kept)
    assert said.endswith("(-50.0%).")
    [said] = counts.of_change(changed(kept, setting, waits=1), kept)
    assert said == f"{setting}: nothing is kept of waits."


def test_with_other_versions_messages_are_compared_only(kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import counts

    dearer = {
        setting: {**told, "our calls": 2 * told["our calls"], "bytes": 2 * told["bytes"]}
        for setting, told in kept["counts"].items()
    }
    monkeypatch.setattr(counts, "versions", lambda: {**kept["versions"], "tensorflow": "2.16.0"})
    assert [": bytes are " in said for said in counts.of_change(dearer, kept)] == [True] * len(dearer)
    monkeypatch.setattr(counts, "versions", lambda: kept["versions"])
    assert len(list(counts.of_change(dearer, kept))) == 2 * len(dearer)


def test_what_grows_faster_than_layers_or_microbatches_is_told(kept: dict[str, Any]) -> None:
    from counts import of_growth

    grown = kept["counts"]["4 layers, 4 microbatches"]["executed"] * 2
    [said] = of_growth(changed(kept, "4 layers, 4 microbatches", executed=grown))
    assert said.startswith("executed by layers rise by ")
    sent = 2 * kept["counts"]["2 layers, 8 microbatches"]["messages"] + 5
    [said] = of_growth(changed(kept, "2 layers, 16 microbatches", messages=sent))
    assert said == "messages are 27 with 8 microbatches and 59 with 16: more than twice as many."
    # A function for every microbatch grows as they do, and is told all the same.
    more = {"2 layers, 8 microbatches": 4, "2 layers, 16 microbatches": 12}
    counts = copy.deepcopy(kept["counts"])
    for setting, number in more.items():
        counts[setting]["functions"] += number
    [said] = of_growth(counts)
    assert said == "functions are 12 with 4 microbatches and 24 with 16: none is made for a microbatch."


@pytest.mark.distributed
@pytest.mark.parametrize("options", params([["--few"], []], only_full=[[]]))
def test_a_start_and_a_step_do_what_they_did(options: list[str]) -> None:
    """If this is meant to change: horovodrun -np 2 python benchmarks/counts.py --update."""
    ran = launch_script(2, "benchmarks/counts.py", options, deadline=240.0)
    assert "Nothing is otherwise than it is kept, or grows faster than it may." in ran.output(0), ran.report()
    ran.expect_clean()


@pytest.mark.distributed
@pytest.mark.full
def test_it_asks_for_two_ranks() -> None:
    ran = launch_script(1, "benchmarks/counts.py", launched=False)
    assert ran.returncode != 0
    assert "counts: start it on two ranks" in ran.output(0)
