"""SmpSend, SmpRecv, SmpBegin and SmpEnd between two processes."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.full_only import params
from tests.ops.rank_fleet import TIMEOUT_S, RankFleet

pytestmark = pytest.mark.large


@pytest.fixture(scope="module")
def pair() -> Iterator[RankFleet]:
    with RankFleet("tf_cases", 2) as ranks:
        ranks.expect("ready")
        yield ranks
        for rank in ranks.ranks:
            assert rank.process.stdin is not None
            rank.process.stdin.close()
        assert [rank.wait(timeout=30) for rank in ranks.ranks] == [0, 0]
        assert ranks[0].messages() == ranks[1].messages() == []


def run(pair: RankFleet, case: str, timeout: float = TIMEOUT_S) -> list[Any]:
    pair.command(case)
    return [told["result"] for told in pair.expect("done", timeout)]


def test_every_dtype_of_fixed_size_arrives_with_the_same_bits(pair: RankFleet) -> None:
    for result in run(pair, "dtypes"):
        assert result["wrong"] == []
        # Newer versions have more.
        assert set(result["sent"]) >= {
            *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "int4", "uint4"),
            *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float8_e5m2", "float8_e4m3fn"),
            *("qint8", "quint8", "qint16", "quint16", "qint32"),
        }


def test_shapes(pair: RankFleet) -> None:
    for result in run(pair, "shapes"):
        assert len(result) == 7
        assert [shape for shape, same in result if not same] == []


def test_dynamic_shape(pair: RankFleet) -> None:
    expected = {"got": [[0, 1, 4], [1, 5, 4], [2, 2, 4]], "static": ["(None, 4)"]}
    assert run(pair, "dynamic_shape") == [expected] * 2


def test_who_asks_is_told_which_collectives_a_rank_has_come_to(pair: RankFleet) -> None:
    for said in run(pair, "collectives"):
        assert said[:-4] == [
            ["before", "", 0, False],
            ["in the first", "first", 1, False],
            ["in both", "first", 2, False],
            ["behind", "", 0, False],
            ["eagerly", "eager", 1, False],
            ["behind an error", "", 0, False],
        ]
        where, name, hashes, are_more = said[-4]
        assert (where, len(name), hashes, are_more) == ("many", 100, 32, True)
        assert said[-3:] == [
            ["behind a function that failed", "of the script", 1, False],
            ["behind the same, which did not fail", "", 0, False],
            ["in the next step", "", 0, False],
        ]


def test_hundreds_each_way_in_any_order(pair: RankFleet) -> None:
    assert run(pair, "many") == [True, True]


@pytest.mark.full  # 20 seconds of processors, most of them TensorFlow's for so many ops
def test_thousands_each_way_in_any_order(pair: RankFleet) -> None:
    assert run(pair, "thousands", timeout=240) == [True, True]


def test_mismatch_names_both_sides(pair: RankFleet) -> None:
    _, (dtype, shape, rank) = run(pair, "mismatch")
    for message, expected in ((dtype, "double[2]"), (shape, "float[3]"), (rank, "float[2,1]")):
        assert f"SmpRecv 'expected' expects {expected} but rank 0 sent 'activation'" in message
        assert "as float[2] (step 8, edge" in message
        assert "microbatch 4)" in message


def test_a_failing_step_cancels_its_receives(pair: RankFleet) -> None:
    for result in run(pair, "cancelled"):
        assert result == {"error": "InvalidArgumentError", "pending": 0}


def test_a_step_reports_the_function_that_failed_and_not_what_was_cancelled_by_it(pair: RankFleet) -> None:
    """One time in two hundred it was the receive."""
    for result in run(pair, "failing_call"):
        assert result == {"errors": ["InvalidArgumentError"], "count": 200, "pending": 0}


def test_a_failing_step_does_not_wait_for_its_sends(pair: RankFleet) -> None:
    assert run(pair, "left_send") == ["InvalidArgumentError", None]


def test_a_key_is_used_once(pair: RankFleet) -> None:
    for message in run(pair, "twice"):
        assert "is already waiting: keys are used once" in message


def test_fences_count_steps(pair: RankFleet) -> None:
    assert run(pair, "fences") == [{"steps": [0, 1, 2, 3], "sum": 6, "other": 0}] * 2


def collapses() -> bool:
    """Whether the kernel puts pages together when it is asked to: from Linux 6.1 on, where it has huge ones at all."""
    size, collapse = 4 << 20, 25
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(b"x" * size)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    library = ctypes.CDLL(None, use_errno=True)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    aligned = -(-start // (2 << 20)) * (2 << 20)
    said = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return said.exists() and "[never]" not in said.read_text() and library.madvise(aligned, 2 << 20, collapse) == 0


@pytest.mark.skipif(not collapses(), reason="this kernel puts no pages together when it is asked to (Linux 6.1 does)")
def test_large_tensors_come_to_lie_in_huge_pages(pair: RankFleet) -> None:
    results = [run(pair, "kept_tensor")]
    # A thread of its own puts them there, which mostly rests.
    while len(results) < 200 and not all(result["huge"] for result in results[-1]):
        results.append(run(pair, "kept_tensor"))
    assert [result["huge"] for result in results[-1]] == [True, True]
    assert all(result["alike"] for each in results for result in each)


def test_large_tensors_stay_where_they_are_where_the_user_says_so() -> None:
    with RankFleet("tf_cases", 2, huge_pages=False) as ranks:
        ranks.expect("ready")
        for _ in range(5):
            assert run(ranks, "kept_tensor") == [{"alike": True, "huge": False}] * 2


@pytest.mark.full  # about 9 GB of memory, and a minute
def test_more_than_2_gib(pair: RankFleet) -> None:
    count = (1 << 31) + 4097
    assert run(pair, "large") == [None, {"size": count, "ones": count}]


def test_a_lost_rank_is_an_error_of_the_op() -> None:
    with RankFleet(["tf_wait_in_op", "wait_in_step"], 2, grace_s=1.0) as ranks:
        ranks.expect("ready")
        os.kill(ranks[1].pid, signal.SIGKILL)
        told = ranks[0].expect("error", timeout=10)
        assert told["type"] == "AbortedError", told
        pattern = (
            r"receive of 'activation' \(step 0, edge 3, microbatch 2\) from rank 1 "
            r"\(host \S+, process \d+\) ended: rank 1 \(host \S+, process \d+\) was lost"
        )
        assert re.search(pattern, told["message"])
        assert ranks[0].wait(timeout=10) == 1
        assert len(ranks[0].messages()) == 1


@pytest.mark.parametrize("number", params([signal.SIGTERM, signal.SIGINT], [signal.SIGTERM]))
def test_a_signal_ends_a_rank_inside_tensorflow(number: signal.Signals) -> None:
    with RankFleet(["tf_wait_in_op", "wait_in_step"], 2, grace_s=1.0) as ranks:
        ranks.expect("ready")
        os.kill(ranks[0].pid, number)
        assert ranks[0].wait(timeout=10) != 0
        assert ranks[1].wait(timeout=10) == 128 + number
        (line,) = ranks[1].messages()
        assert f"was ended by {number.name}" in line
        assert "rank 0 (host" in line
