"""Exchanges between ranks: everybody hears the same, and a rank that is astray is told to all in the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from smp_tf.errors import RankMismatchError
from smp_tf.job import channel
from smp_tf.job.channel import tag_of
from smp_tf.job.exchange import agree, allgather_json, barrier, broadcast_json, members_of
from smp_tf.partition.mesh import CommGroup
from tests.smp_tf.rank_threads import Ranks


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ranks]:
    # The later ranks need not outwait the first one's verdict: here it comes at once.
    monkeypatch.setattr(channel, "_PATIENCE", 5.0)
    return lambda *args, **kwargs: Ranks(monkeypatch, *args, **kwargs)


class TestExchange:
    def test_every_rank_hears_what_all_say_in_group_order(self, ranks: Callable[..., Ranks]) -> None:
        found = ranks(3).run(lambda rank: allgather_json({"rank": rank, "list": [1, None, "é"]}, name="a test"))
        assert found == [[{"rank": rank, "list": [1, None, "é"]} for rank in range(3)]] * 3

    def test_groups_do_not_hear_each_other(self, ranks: Callable[..., Ranks]) -> None:
        world = ranks(4, partitions=2)
        assert world.run(lambda rank: allgather_json(rank, CommGroup.MP_GROUP, name="a test")) == [
            [0, 1], [0, 1], [2, 3], [2, 3],
        ]  # fmt: skip
        assert world.run(lambda rank: allgather_json(rank, CommGroup.DP_GROUP, name="a test")) == [
            [0, 2], [1, 3], [0, 2], [1, 3],
        ]  # fmt: skip

    def test_ranks_in_an_order_of_their_own(self, ranks: Callable[..., Ranks]) -> None:
        found = ranks(3).run(lambda rank: allgather_json(rank, (2, 0), name="a test") if rank != 1 else None)
        assert found == [[2, 0], None, [2, 0]]

    def test_one_rank_speaks(self, ranks: Callable[..., Ranks]) -> None:
        assert ranks(3).run(lambda rank: broadcast_json(f"of rank {rank}", 1, name="a test")) == ["of rank 1"] * 3

    def test_a_group_of_one_hears_what_json_makes_of_its_words(self, ranks: Callable[..., Ranks]) -> None:
        world = ranks(1)
        assert world.run(lambda rank: allgather_json({"pair": (1, 2)}, name="a test")) == [[{"pair": [1, 2]}]]
        assert world.run(lambda rank: barrier()) == [None]
        assert world.transports[0].activities == []

    def test_many_one_after_the_other(self, ranks: Callable[..., Ranks]) -> None:
        def talk(rank: int) -> list[Any]:
            return [allgather_json([turn, rank], name=f"turn {turn}") for turn in range(20)]

        assert ranks(2).run(talk) == [[[[turn, 0], [turn, 1]] for turn in range(20)]] * 2

    def test_meanwhile_others_are_told_what_a_rank_is_doing(self, ranks: Callable[..., Ranks]) -> None:
        world = ranks(2)
        world.run(lambda rank: allgather_json(rank, name="a test", doing="about to run step 'train'" if rank else ""))
        assert [t.activities for t in world.transports] == [["at a test", ""], ["about to run step 'train'", ""]]


class TestAstray:
    def test_ranks_at_different_places_are_told_on_every_rank(self, ranks: Callable[..., Ranks]) -> None:
        found = ranks(3).run(lambda rank: barrier(name="the save" if rank == 1 else "the plan"))
        assert [type(error) for error in found] == [RankMismatchError] * 3
        assert {str(error) for error in found} == {
            "The ranks are at different places of the script: rank 0 is at 'the plan'; rank 1 is at 'the save'; "
            "rank 2 is at 'the plan'. Every rank must make the same calls in the same order."
        }

    def test_another_version_of_the_protocol(
        self, ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = channel._encode

        def older_on_rank_1(value: Any, name: str) -> bytes:
            if value.get("value") == 1:
                value = {**value, "version": 0}
            return real(value, name)

        monkeypatch.setattr(channel, "_encode", older_on_rank_1)
        found = ranks(2).run(lambda rank: allgather_json(rank, name="a test"))
        assert {str(error) for error in found} == {
            "The ranks run different versions of smp_tf's control protocol: rank 0 is at 1; rank 1 is at 0."
        }

    def test_a_rank_that_does_not_come_is_told_to_those_that_did(self, ranks: Callable[..., Ranks]) -> None:
        world = ranks(3)
        found = world.run(lambda rank: barrier(name="the save", timeout=0.1) if rank != 2 else None)
        assert found[2] is None
        assert [type(error) for error in found[:2]] == [RankMismatchError] * 2
        assert str(found[0]) == str(found[1])
        assert str(found[0]).startswith("rank 2 did not come to the save within 0 s, while other ranks waited.")
        assert "larger stall_timeout" in str(found[0])
        # Nothing lies in wait for it that it would take for the answer to its next exchange.
        with pytest.raises(TimeoutError):
            world.transports[2].recv_bytes(0, tag_of("control", (0, 1, 2)), 0.01)

    def test_the_first_rank_that_does_not_come(
        self, ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(channel, "_PATIENCE", 0.1)
        found = ranks(2).run(lambda rank: barrier(name="the save", timeout=0.1) if rank else None)
        assert "rank 0 did not come to the save" in str(found[1])

    def test_after_an_error_nobody_is_said_to_be_waiting(self, ranks: Callable[..., Ranks]) -> None:
        world = ranks(2)
        world.run(lambda rank: barrier(name=f"place {rank}"))
        assert [t.activities[-1] for t in world.transports] == ["", ""]


class TestAgree:
    def test_equal_values_pass(self, ranks: Callable[..., Ranks]) -> None:
        assert ranks(3).run(lambda rank: agree("the batch", {"size": 8})) == [None] * 3

    def test_a_difference_is_told_on_every_rank(self, ranks: Callable[..., Ranks]) -> None:
        found = ranks(3).run(lambda rank: agree("the batch", {"size": 4 if rank == 2 else 8}, hint="Pass the same."))
        assert [type(error) for error in found] == [RankMismatchError] * 3
        assert {str(error) for error in found} == {
            "The ranks do not agree on the batch:\n  size: rank 2 has 4; ranks 0 and 1 have 8\nPass the same."
        }


class TestWhatIsSaid:
    def test_more_than_the_limit_is_refused_before_it_is_sent(
        self, ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(channel, "SIZE_LIMIT", 100)
        (error,) = ranks(1).run(lambda rank: allgather_json("x" * 100, name="a test"))
        assert isinstance(error, ValueError)
        assert "a test: 140 bytes of JSON are more than 100." in str(error)

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            (b"{", "received something that is not JSON"),
            (b"\xff", "received something that is not JSON"),
            (b"[1]", "received a list of JSON, not a dict"),
            (b" " * 101, "received 101 bytes, more than 100"),
        ],
    )
    def test_what_is_no_exchange_is_told(self, text: bytes, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(channel, "SIZE_LIMIT", 100)
        with pytest.raises(RankMismatchError, match=f"a test: {words}"):
            channel._decode(text, "a test")

    def test_what_json_does_not_hold(self, ranks: Callable[..., Ranks]) -> None:
        (error,) = ranks(1).run(lambda rank: allgather_json(object(), name="a test"))
        assert isinstance(error, TypeError)


class TestMembers:
    def test_of_a_kind_of_group_and_of_ranks(self, ranks: Callable[..., Ranks]) -> None:
        world = ranks(4, partitions=2)
        assert world.run(lambda rank: members_of(CommGroup.DP_GROUP)) == [(0, 2), (1, 3), (0, 2), (1, 3)]
        assert world.run(lambda rank: members_of([3, 2, 1, 0])) == [(3, 2, 1, 0)] * 4

    def test_a_rank_outside(self, ranks: Callable[..., Ranks]) -> None:
        found = ranks(3).run(lambda rank: members_of((0, 1)))
        assert str(found[2]) == "Rank 2 is not in the group of ranks [0, 1]."

    def test_a_speaker_outside(self, ranks: Callable[..., Ranks]) -> None:
        found = ranks(4, partitions=2).run(lambda rank: broadcast_json("x", 0, CommGroup.MP_GROUP, name="a test"))
        assert found[:2] == ["x", "x"]
        assert str(found[2]) == "a test: the root, rank 0, is not in the group [2, 3]."


def test_tags_are_the_same_on_every_rank_and_differ_by_what_they_are_for() -> None:
    assert tag_of("control", (0, 1)) == 0x6F05048AD3F89394
    tags = {tag_of("control", (0, 1)), tag_of("control", (1, 0)), tag_of("objects"), tag_of("saved value", 1)}
    assert len(tags) == 4
    assert all(0 <= tag < 1 << 63 for tag in tags)
