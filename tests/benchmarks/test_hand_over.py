"""The benchmark of a hand-over: its figures from literal moments, and what it writes, not how fast it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.harness import launch_script


def test_a_way_is_from_ready_on_one_rank_to_started_on_the_other() -> None:
    from hand_over import one_way

    first = {"ready": [100, 200, 300], "given": [101, 202, 303], "there": [160, 270, 380], "started": [170, 290, 400]}
    second = {"ready": [130, 240, 350], "given": [131, 241, 351], "there": [111, 232, 363], "started": [125, 245, 390]}
    assert one_way(first, second) == {
        "forward": 45,
        "back": 50,
        "give": 2,
        "carry": 30,
        "start": 14,
    }
    for told in (first, second):
        del told["given"], told["there"]
    assert one_way(first, second) == {"forward": 45, "back": 50}


def test_ratios_are_those_of_one_repetition() -> None:
    from hand_over import figures

    found = figures(
        {
            "smp_tf": [{"forward": 20.0}, {"forward": 80.0}, {"forward": 90.0}],
            "polling": [{"forward": 10.0}, {"forward": 80.0}, {"forward": 30.0}],
        }
    )
    assert found["smp_tf"]["forward_us"]["median"] == 0.08
    assert found["smp_tf"]["over_polling"]["all"] == [2.0, 1.0, 3.0]
    assert "over_sleeping" not in found["smp_tf"]


@pytest.mark.parametrize(
    ("size", "count"), [(4096, 20), (4 << 20, 20), (8 << 20, 10), (64 << 20, 5)], ids=["4K", "4M", "8M", "64M"]
)
def test_large_tensors_are_exchanged_less_often(size: int, count: int) -> None:
    from hand_over import count_of

    assert count_of(20, size) == count


def test_a_size_has_a_unit() -> None:
    from hand_over import bytes_of

    assert [bytes_of(text) for text in ("4KiB", "64MiB")] == [4096, 67108864]
    for text in ("4096", "4 KiB", "-1KiB", "0KiB", "1.5MiB", "KiB"):
        with pytest.raises(ValueError, match=r"a whole number of KiB or MiB, such as 4KiB. Received: "):
            bytes_of(text)


@pytest.mark.full
@pytest.mark.distributed
def test_every_way_is_measured(tmp_path: Path) -> None:
    from hand_over import WAYS

    out = tmp_path / "hand_over.json"
    # Rendezvous begins between the two sizes.
    options = f"--sizes 4KiB,64KiB --repetitions 2 --count 3 --gap 0.5 --patience 120 --json {out}"
    ran = launch_script(1, "benchmarks/hand_over.py", options.split(), deadline=300.0, launched=False).expect_clean()
    result = json.loads(out.read_text())
    # mpi4py is no requirement of ours.
    assert WAYS.keys() - result["missing"].keys() >= WAYS.keys() - {"mpi4py", "perftest"}
    assert result["sizes"].keys() == {"4KiB", "64KiB"}
    for ways in result["sizes"].values():
        assert ways.keys() == WAYS.keys() - result["missing"].keys()
        for found in ways.values():
            assert len(found["forward_us"]["all"]) == 2
            assert min(found["forward_us"]["all"]) > 0
            assert found["over_polling"]["median"] > 0
        assert ways["polling"]["over_polling"]["all"] == [1.0, 1.0]
        assert {"give_us", "carry_us", "start_us"} <= ways["smp_tf"].keys()
    assert "smp_tf in its parts" in ran.output(0)
