"""A disagreement between ranks is told by rank and field, with the majority as the right one."""

import pytest

from smp_tf.errors import RankMismatchError
from smp_tf.job.agreement import require_agreement


def message(said, **kwargs):
    with pytest.raises(RankMismatchError) as raised:
        require_agreement("the plan", said, **kwargs)
    return str(raised.value).splitlines()


def test_equal_values_pass():
    require_agreement("the plan", {0: {"a": [1, 2]}, 1: {"a": [1, 2]}})


def test_the_minority_is_the_one_that_differs():
    said = {0: {"batch": 8}, 1: {"batch": 4}, 2: {"batch": 8}}
    assert message(said, hint="Pass the same batch.") == [
        "The ranks do not agree on the plan:",
        "  batch: rank 1 has 4; ranks 0 and 2 have 8",
        "Pass the same batch.",
    ]


def test_between_two_the_lower_rank_is_believed():
    assert message({3: "x", 5: "y"})[1] == "  rank 5 has 'y'; rank 3 has 'x'"


def test_only_the_fields_that_differ_are_told():
    said = {
        0: {"shapes": {"x": [8, 3], "y": [8]}, "layers": ["a", "b"]},
        1: {"shapes": {"x": [8, 4], "y": [8]}, "layers": ["a", "c"]},
    }
    assert message(said)[1:] == [
        "  shapes.x[1]: rank 1 has 4; rank 0 has 3",
        "  layers[1]: rank 1 has 'c'; rank 0 has 'b'",
    ]


def test_a_field_that_one_rank_lacks():
    assert message({0: {"a": 1, "b": 2}, 1: {"a": 1}}) == [
        "The ranks do not agree on the plan:",
        "  b: rank 1 has nothing; rank 0 has 2",
    ]


def test_lists_of_different_length_are_told_whole():
    assert message({0: [1, 2], 1: [1]})[1] == "  rank 1 has [1]; rank 0 has [1, 2]"


def test_true_is_not_one():
    assert message({0: {"a": 1}, 1: {"a": True}})[1] == "  a: rank 1 has True; rank 0 has 1"


def test_ranks_are_named_as_the_caller_does():
    words = message({0: 1, 1: 2}, describe=lambda rank: f"rank {rank} (host h{rank})")
    assert words[1] == "  rank 1 (host h1) has 2; rank 0 has 1"


def test_long_values_and_many_fields_are_cut():
    said = {0: dict.fromkeys("abcdefg", "x" * 500), 1: dict.fromkeys("abcdefg", "y" * 500)}
    lines = message(said)
    assert len(lines) == 7
    assert lines[-1] == "  and 2 more differences"
    assert "... (502 characters)" in lines[1]
    assert len(lines[1]) < 600
