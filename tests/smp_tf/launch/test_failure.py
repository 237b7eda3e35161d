"""What is said of a failed job: which rank, where, why, what to do, and the exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from smp_tf.launch import printed_error as reader
from smp_tf.launch.failure import Failure, failure_of, render
from smp_tf.launch.job import JobEnd, RankEnd
from smp_tf.launch.printed_error import printed_error

SMP_TF = str(Path(reader.__file__).parents[1])
SCRIPT_ERROR = [
    "Epoch 1/4",
    "Traceback (most recent call last):",
    '  File "/work/train.py", line 21, in <module>',
    "    model.fit(x, y)",
    f'  File "{SMP_TF}/model/model.py", line 193, in fit',
    "    return run_loop(self, super().fit, args, kwargs)",
    '  File "/venv/lib/python3.11/site-packages/tf_keras/src/utils/traceback_utils.py", line 70, in error_handler',
    "    raise e.with_traceback(filtered_tb) from None",
    '  File "/work/train.py", line 18, in on_epoch_end',
    '    raise RuntimeError("my own error")',
    "^^^^^^^^^^^^^^^^^^^^^^^^",
    "RuntimeError: my own error",
    "smp_tf: [rank 1] rank 1 (host a, pid 7, stage 1 of replica 0) failed: RuntimeError: my own error (at x.py:1 in f)",
]
LAYER_ERROR = [
    "Traceback (most recent call last):",
    '  File "/work/train.py", line 21, in <module>',
    "    model.fit(x, y)",
    '  File "/tmp/__autograph_generated_fileaz4cwqlc.py", line 18, in if_body',
    "    raise ag__.converted_call(ag__.ld(ValueError), ('bad layer',), None, fscope)",
    "ValueError: Exception encountered when calling layer 'net' (type Net).",
    "",
    "in user code:",
    "",
    '    File "/work/train.py", line 14, in call  *',
    "        return self.c(self.b(self.a(x)))",
    f'    File "{SMP_TF}/keras/layers.py", line 121, in tagged  **',
    "        return original(layer, *args, **kwargs)",
    "",
    "    ValueError: Exception encountered when calling layer 'bad' (type Bad).",
    "    ",
    "    in user code:",
    "    ",
    '        File "/work/model.py", line 7, in call  *',
    '            raise ValueError("bad layer")',
    "    ",
    "        ValueError: bad layer",
    "    ",
    "    ",
    "    Call arguments received by layer 'bad' (type Bad):",
    "      • x=tf.Tensor(shape=(8, 8), dtype=float32)",
]
GRAPH_ERROR = [
    "Traceback (most recent call last):",
    '  File "/work/train.py", line 21, in <module>',
    "    model.fit(x, y)",
    "tensorflow.python.framework.errors_impl.InvalidArgumentError: Graph execution error:",
    "",
    "Detected at node net/bad/assert_less/Assert defined at (most recent call last):",
    "<stack traces unavailable>",
    "assertion failed: [too large] [x (net/bad/Max:0) = ] [0.8]",
    "\t [[{{node net/bad/assert_less/Assert}}]]",
    "\t [[0F0/SmpCall]] [Op:__inference_train_step_1_837]",
]


@pytest.mark.parametrize(
    ("lines", "words", "place"),
    [
        (SCRIPT_ERROR, "RuntimeError: my own error", "/work/train.py:18 in on_epoch_end"),
        (LAYER_ERROR, "ValueError: bad layer", "layer 'bad' (type Bad), /work/model.py:7 in call"),
        (
            GRAPH_ERROR,
            "InvalidArgumentError: assertion failed: [too large] [x (net/bad/Max:0) = ] [0.8]",
            "op net/bad/assert_less/Assert, /work/train.py:21 in <module>",
        ),
        (
            [
                "Traceback (most recent call last):",
                '  File "/usr/lib/python3.11/json/__init__.py", line 3, in load',
                "Oh",
            ],
            "Oh",
            "/usr/lib/python3.11/json/__init__.py:3 in load",
        ),
        ([*LAYER_ERROR, "During handling", *SCRIPT_ERROR], "RuntimeError: my own error", None),
        ([*SCRIPT_ERROR, *LAYER_ERROR], "RuntimeError: my own error", None),
        ([SCRIPT_ERROR[-1], *LAYER_ERROR], "ValueError: bad layer", None),
    ],
    ids=["script", "layer", "graph", "library", "last", "at exit", "late"],
)
def test_the_error_of_the_last_traceback_is_found(lines: list[str], words: str, place: str | None) -> None:
    found = printed_error(lines)
    assert found is not None
    assert found.words == words
    assert place is None or found.place == place


@pytest.mark.parametrize("lines", [[], ["all is well"], ["Traceback (most recent call last):", "  File"]])
def test_where_there_is_no_error_none_is_found(lines: list[str]) -> None:
    assert printed_error(lines) is None


def end_of(rank: int, status: int | None, is_asked: bool = False) -> RankEnd:
    return RankEnd(rank, "a", 10 + rank, status, is_asked)


def failure(*ends: RankEnd, said: list[tuple[int, str]] | None = None, printed: list[str] | None = None) -> Failure:
    """The failure of a job of three ranks whose rank 1 has printed something."""
    return failure_of(JobEnd(list(ends)), said or [], [[], printed or [], []], None)


def test_the_first_that_failed_by_itself_is_named() -> None:
    found = failure(end_of(0, 0), end_of(2, -15, is_asked=True), end_of(1, 3))
    assert (found.who, found.code) == ("rank 1 of 3 (host a, process 11), exit code 3", 3)
    assert found.why == "it printed no error; its last lines are above"


def test_what_smp_tf_says_names_another_than_the_first() -> None:
    said = [(0, SCRIPT_ERROR[-1].replace("[rank 1] ", "[rank 0] "))]
    found = failure(end_of(0, 1), end_of(1, 7), said=said, printed=SCRIPT_ERROR)
    assert (found.who, found.code) == ("rank 1 of 3 (host a, process 11), exit code 7", 7)
    assert (found.why, found.where) == ("RuntimeError: my own error", "/work/train.py:18 in on_epoch_end")
    # It had no time to end by itself: the code is that of the one that did.
    found = failure(end_of(0, 5), end_of(1, -15, is_asked=True), said=said, printed=SCRIPT_ERROR)
    assert found.who == (
        "rank 1 of 3 (host a, process 11), killed by SIGTERM (exit code 143), after it was told to end"
    )
    assert (found.why, found.code) == ("RuntimeError: my own error", 5)
    # Without a traceback, smp_tf's words are there.
    found = failure(end_of(0, 1), end_of(1, 7), said=said)
    assert (found.why, found.where) == ("RuntimeError: my own error", "x.py:1 in f")


def test_ranks_that_differ_are_told_in_the_words_for_all() -> None:
    words = "The ranks traced different models for step 'train'. The first difference: rank 0 has more."
    said = [(rank, f"smp_tf: [rank {rank}] {words}") for rank in (0, 1)]
    printed = [
        "Traceback (most recent call last):",
        '  File "/work/train.py", line 21, in <module>',
        "    train(batch)",
        "smp_tf.errors.RankMismatchError: in user code:",
        "",
        '    File "/work/train.py", line 9, in train  *',
        "        loss = step(batch)",
        "",
        f"    RankMismatchError: {words}",
        "",
    ]
    assert printed_error(printed) == reader.PrintedError(f"RankMismatchError: {words}", "/work/train.py:9 in train")
    found = failure(end_of(0, 1), end_of(1, 1), said=said, printed=printed)
    assert found.who == "rank 1 of 3 (host a, process 11), exit code 1"
    assert (found.why, found.where) == (words, "/work/train.py:9 in train")


def test_a_rank_that_follows_another_is_not_named() -> None:
    """It was ended by us, and says so."""
    said = [(0, "smp_tf: rank 0 (host a) was ended by SIGTERM before smp.init: rank 1 (host a, pid 11) had ended.")]
    assert failure(end_of(1, 2), end_of(0, -15, is_asked=True), said=said).who.startswith("rank 1 of 3")


def test_a_killed_rank_is_told_with_the_step_of_another() -> None:
    said = [
        (
            0,
            "smp_tf: [rank 0] rank 1 (host a, process 11) was lost: its process ended without a word. Rank 0 (host a) "
            "was after step 11",
        )
    ]
    found = failure(end_of(1, -9), end_of(0, 1), said=said)
    assert (found.who, found.code) == ("rank 1 of 3 (host a, process 11), killed by SIGKILL (exit code 137)", 137)
    assert (found.where, found.why) == ("rank 0 was after step 11", "often it is the out-of-memory killer")
    assert found.advice[0].startswith("`dmesg | grep -i oom` tells.")


def test_a_rank_killed_in_its_start_is_told_with_the_place() -> None:
    by_signal = "smp_tf: rank 0 (host a) was ended by SIGTERM before smp.init: rank 1 (host a, pid 11) had ended."
    by_error = (
        "smp_tf.ops.errors.PeerError: Rank 1 (host a, pid 11) ended while the ranks greeted each other "
        "(smp_tf.addresses). Its own message says why."
    )
    for line, place in ((by_signal, "before smp.init"), (by_error, "while the ranks greeted each other")):
        ends = [end_of(1, -9), end_of(0, -15, is_asked=True)]
        assert failure_of(JobEnd(ends), [], [[line], []], None).where == place


def test_a_lost_host_is_told_with_its_last_words() -> None:
    end = JobEnd([end_of(1, None)], last_words={"a": ["client_loop: send disconnect: Broken pipe"]})
    found = failure_of(end, [], [[], []], Path("logs/rank_{rank}.log"))
    assert found == Failure(
        "rank 1 of 2 (host a, process 11), lost with its host",
        "the connection to host a ended: client_loop: send disconnect: Broken pipe",
        None,
        ["all that rank 1 printed is in logs/rank_1.log"],
        1,
    )


def test_the_block_fits_the_terminal() -> None:
    told = Failure("rank 1", "ValueError: " + "long words " * 9, None, ["do this", "or that"], 1)
    lines = render(told, "the job failed", 50, is_colored=False).splitlines()
    assert {len(line) for line in lines} == {50}
    assert lines[0].startswith("╭─ smp-tf: the job failed ─")
    plain = render(told, "the job failed", None, is_colored=False).splitlines()
    assert plain[0] == "smp-tf: the job failed"
    assert plain[2].endswith("long words ")
    assert plain[3:] == ["  what to do  do this", "              or that"]
    assert "\x1b[" in render(told, "the job failed", 50, is_colored=True)
