"""Python objects between ranks: in order, to the right ones, and what cannot be sent is told."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import smp_tf as smp
from smp_tf.errors import MessageError, NotInitializedError
from smp_tf.job import objects as messaging
from tests.smp_tf.rank_threads import DEADLINE, Ranks


def header(*sizes: int, parts: int = 0, number: int = 0, call: int = 0) -> bytes:
    """What an object begins with."""
    return messaging._HEADER.pack(messaging._MARK, parts, number, call) + b"".join(map(messaging._SIZE.pack, sizes))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ranks]:
    return lambda *args, **kwargs: Ranks(monkeypatch, *args, **kwargs)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("not this one")


def _fail() -> None:
    raise ImportError("no such class here")


class Unreadable:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return _fail, ()


class TestSend:
    def test_objects_arrive_in_the_order_they_were_sent(self, ranks: Callable[..., Ranks]) -> None:
        sent = [{"epoch": 3}, None, np.arange(3), "text", (1, [2.5])]

        def talk(rank: int) -> Any:
            if rank == 0:
                for obj in sent:
                    smp.send(obj, 1)
                return None
            return [smp.recv_from(0) for _ in sent]

        _, found = ranks(2).run(talk)
        assert found[2].tolist() == [0, 1, 2]
        assert [found[n] for n in (0, 1, 3, 4)] == [{"epoch": 3}, None, "text", (1, [2.5])]

    @pytest.mark.parametrize(
        ("kind", "number", "receiver"),
        [(smp.RankType.WORLD_RANK, 2, 2), (smp.RankType.MP_RANK, 1, 1), (smp.RankType.DP_RANK, 1, 2)],
        ids=lambda value: getattr(value, "name", ""),
    )
    def test_the_receiver_may_be_counted_in_any_group(
        self, ranks: Callable[..., Ranks], kind: smp.RankType, number: int, receiver: int
    ) -> None:
        def talk(rank: int) -> Any:
            if rank == 0:
                smp.send("for you", number, kind)
            return smp.recv_from(0) if rank == receiver else None

        assert ranks(4, partitions=2).run(talk) == ["for you" if rank == receiver else None for rank in range(4)]

    def test_the_sender_may_be_counted_in_any_group(self, ranks: Callable[..., Ranks]) -> None:
        def talk(rank: int) -> Any:
            if rank == 1:
                smp.send("from you", 3)
            return smp.recv_from(0, smp.RankType.DP_RANK) if rank == 3 else None

        assert ranks(4, partitions=2).run(talk)[3] == "from you"

    def test_to_itself(self, ranks: Callable[..., Ranks]) -> None:
        _, found = ranks(2).run(lambda rank: smp.send("x", 1))
        assert isinstance(found, MessageError)
        assert str(found) == "A rank cannot send to itself: WORLD_RANK 1 is this rank, 1."

    def test_from_itself(self, ranks: Callable[..., Ranks]) -> None:
        (found,) = ranks(1).run(lambda rank: smp.recv_from(0, smp.RankType.MP_RANK))
        assert str(found) == "A rank cannot receive from itself: MP_RANK 0 is this rank, 0."

    def test_what_cannot_be_pickled(self, ranks: Callable[..., Ranks]) -> None:
        (found, _) = ranks(2).run(lambda rank: smp.send(Unpicklable(), 1) if rank == 0 else None)
        assert isinstance(found, MessageError)
        assert str(found) == "An object of type Unpicklable cannot be pickled, so it cannot be sent: not this one"

    def test_what_cannot_be_unpickled(self, ranks: Callable[..., Ranks]) -> None:
        _, found = ranks(2).run(lambda rank: smp.send(Unreadable(), 1) if rank == 0 else smp.recv_from(0))
        assert isinstance(found, MessageError)
        assert str(found) == "An object that rank 0 sent cannot be unpickled here: no such class here"

    def test_a_number_that_is_no_kind_of_rank(self, ranks: Callable[..., Ranks]) -> None:
        (found,) = ranks(1).run(lambda rank: smp.send("x", 0, "mp"))  # type: ignore[arg-type]
        assert isinstance(found, TypeError)
        assert "rank_type is one of smp.RankType.WORLD_RANK, smp.RankType.MP_RANK" in str(found)


class TestGroups:
    def test_a_broadcast_reaches_the_others_of_the_group_only(self, ranks: Callable[..., Ranks]) -> None:
        def talk(rank: int) -> Any:
            if rank == 2:
                smp.broadcast({"to": "my replica"}, smp.MP_GROUP)
            return smp.recv_from(2) if rank == 3 else None

        world = ranks(4, partitions=2)
        assert world.run(talk) == [None, None, None, {"to": "my replica"}]

    def test_everybody_has_what_everybody_gives_in_rank_order(self, ranks: Callable[..., Ranks]) -> None:
        found = ranks(4, partitions=2).run(lambda rank: (smp.allgather(rank), smp.allgather({rank}, smp.DP_GROUP)))
        assert [everyone for everyone, _ in found] == [[0, 1, 2, 3]] * 4
        assert [group for _, group in found] == [[{0}, {2}], [{1}, {3}], [{0}, {2}], [{1}, {3}]]

    def test_alone_it_is_a_copy_of_one_s_own(self, ranks: Callable[..., Ranks]) -> None:
        own = [1, [2]]
        ((found,),) = ranks(1).run(lambda rank: smp.allgather(own))
        assert found == own
        assert found is not own

    @pytest.mark.parametrize("barrier", [smp.barrier, smp.mp_barrier], ids=lambda b: b.__name__)
    def test_a_barrier_opens_when_all_have_come(self, ranks: Callable[..., Ranks], barrier: Callable[[], None]) -> None:
        comes, events = threading.Event(), []

        def talk(rank: int) -> None:
            if rank == 0:
                comes.wait(DEADLINE)
                events.append("rank 0 comes")
                barrier()
            else:
                comes.set()
                barrier()
                events.append("rank 1 goes on")

        ranks(2, partitions=2).run(talk)
        assert events == ["rank 0 comes", "rank 1 goes on"]

    def test_barriers_of_different_groups_are_independent(self, ranks: Callable[..., Ranks]) -> None:
        assert ranks(4, partitions=2).run(lambda rank: (smp.mp_barrier(), smp.dp_barrier())) == [(None, None)] * 4

    @pytest.mark.parametrize("call", [lambda g: smp.broadcast(1, g), lambda g: smp.allgather(1, g), smp.barrier])
    def test_what_is_no_group(self, call: Callable[[Any], Any], ranks: Callable[..., Ranks]) -> None:
        (found,) = ranks(1).run(lambda rank: call([0]))
        assert isinstance(found, TypeError)
        assert str(found).startswith("A group is one of smp.WORLD, smp.MP_GROUP, smp.DP_GROUP")


def test_before_init() -> None:
    for call in (smp.barrier, lambda: smp.send(1, 0), lambda: smp.recv_from(0), lambda: smp.allgather(1)):
        with pytest.raises(NotInitializedError):
            call()


class TestLargeObjects:
    def test_large_buffers_travel_apart_and_are_used_where_they_arrive(self, ranks: Callable[..., Ranks]) -> None:
        array, words = np.arange(100_000, dtype=np.float64), "x" * 100_000
        world = ranks(2)
        sent: list[Any] = []
        send_bytes = world.transports[0].send_bytes

        def noted(dest: int, tag: int, data: Any, timeout: float | None = None, label: str = "") -> None:
            sent.append(data)
            send_bytes(dest, tag, data, timeout, label)

        world.transports[0].send_bytes = noted  # type: ignore[method-assign]

        def talk(rank: int) -> Any:
            if rank == 0:
                smp.send({"array": array, "words": words, "small": np.arange(3)}, 1)
                return None
            return smp.recv_from(0)

        found = world.run(talk)[1]
        header, pickled, buffer = sent
        assert (len(header), len(pickled) > 100_000) == (messaging._HEADER.size + 2 * 8, True)
        assert np.shares_memory(np.frombuffer(buffer, np.float64), array)
        assert (found["words"] == words, found["small"].tolist()) == (True, [0, 1, 2])
        np.testing.assert_array_equal(found["array"], array)

    @pytest.mark.parametrize("rank", [0, 1, 2])
    def test_all_ranks_gather_them(self, ranks: Callable[..., Ranks], rank: int) -> None:
        found = ranks(3).run(lambda mine: smp.allgather([np.full(20_000, mine), mine]))[rank]
        assert [(array[0], len(array), said) for array, said in found] == [(r, 20_000, r) for r in range(3)]


class TestWholeObjects:
    """Parts of two objects were once taken for each other's, and raw arrays for headers and pickles."""

    def test_threads_of_a_rank_send_and_receive_at_the_same_time(self, ranks: Callable[..., Ranks]) -> None:
        world = ranks(2)
        count = 150
        interval = sys.getswitchinterval()

        def talk(rank: int) -> Any:
            found: list[Any] = []

            def send(value: int) -> None:
                world.in_thread_of(rank)
                for number in range(count):
                    smp.send((value, number, np.full(10_000, value, np.float64)), 1)

            def receive(value: int) -> None:
                world.in_thread_of(rank)
                for _ in range(count):
                    found.append(smp.recv_from(0))

            threads = [threading.Thread(target=receive if rank else send, args=(value,)) for value in (1, 2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(DEADLINE)
            return found

        sys.setswitchinterval(1e-6)
        try:
            _, found = world.run(talk)
        finally:
            sys.setswitchinterval(interval)
        assert len(found) == 2 * count
        assert all((array == value).all() for value, _, array in found)
        for value in (1, 2):
            assert sorted(number for sent, number, _ in found if sent == value) == list(range(count))

    @pytest.mark.parametrize(
        ("messages", "words"),
        [
            ([b"1234567"], "7 bytes came where object 1 was due"),
            ([np.ones(9).tobytes()], "72 bytes came where object 1 was due"),
            ([header(parts=2**62)], "says 4611686018427387904 parts, and has no room for their sizes"),
            ([header(number=3)], "object 4 came where 1 was due"),
            ([header(call=2)], "an object of call 2 of smp.allgather came in call 0"),
            ([header()], "object 1 has no content"),
            ([header(3, parts=1), b"four"], "part 1 of 1 of object 1 has 4 bytes, and its header says 3"),
        ],
        ids=["short", "an array", "too many parts", "another object", "of another call", "empty", "another part"],
    )
    def test_what_is_no_object_is_an_error_and_not_unpickled(
        self, ranks: Callable[..., Ranks], messages: list[bytes], words: str
    ) -> None:
        world = ranks(2)

        def talk(rank: int) -> Any:
            if rank == 1:
                return smp.recv_from(0)
            for message in messages:
                world.transports[0].send_bytes(1, messaging._OBJECTS, message)
            return None

        _, found = world.run(talk)
        assert isinstance(found, MessageError)
        assert str(found).startswith("Objects that rank 0 sends do not come whole: ")
        assert words in str(found)
        assert str(found).endswith("Nothing was unpickled; let such an exception end the script.")

    def test_an_object_that_was_given_up_half_way_is_noticed(self, ranks: Callable[..., Ranks]) -> None:
        world = ranks(2)
        send_bytes = world.transports[0].send_bytes
        interrupted = threading.Event()

        def once(dest: int, tag: int, data: Any, timeout: float | None = None, label: str = "") -> None:
            if len(data) == 80_000 and not interrupted.is_set():
                interrupted.set()
                raise KeyboardInterrupt
            send_bytes(dest, tag, data, timeout, label)

        world.transports[0].send_bytes = once  # type: ignore[method-assign]

        def talk(rank: int) -> Any:
            if rank == 1:
                return smp.recv_from(0)
            with pytest.raises(KeyboardInterrupt):
                smp.send(np.ones(10_000), 1)
            smp.send(np.zeros(10_000), 1)
            return None

        _, found = world.run(talk)
        assert isinstance(found, MessageError)
        assert "part 1 of 1 of object 1 has" in str(found)

    @pytest.mark.parametrize("interrupted", ["send", "receive", "allgather"])
    def test_a_signal_handler_within_a_call_is_told_so(self, ranks: Callable[..., Ranks], interrupted: str) -> None:
        """It waited for the call that it had interrupted, for ever."""
        world = ranks(2)
        calls = {
            "send": lambda: smp.send("x", 1),
            "receive": lambda: smp.recv_from(1),
            "allgather": lambda: smp.allgather(0),
        }
        transport = world.transports[0]
        name = "recv_bytes" if interrupted == "receive" else "send_bytes"
        if interrupted == "allgather":
            name = "recv_bytes"
        original = getattr(transport, name)
        found: list[str] = []

        def in_the_midst(*args: Any, **kwargs: Any) -> Any:
            setattr(transport, name, original)
            with pytest.raises(MessageError) as caught:
                calls[interrupted]()
            found.append(str(caught.value))
            return original(*args, **kwargs)

        setattr(transport, name, in_the_midst)
        others = {
            "send": lambda: smp.recv_from(0),
            "receive": lambda: smp.send("x", 0),
            "allgather": lambda: smp.allgather(1),
        }
        results = world.run(lambda rank: others[interrupted]() if rank else calls[interrupted]())
        assert not any(isinstance(result, Exception) for result in results), results
        assert found == [messaging._WITHIN]
        assert found[0].startswith("A signal handler")

    def test_threads_of_a_rank_gather_one_after_the_other(self, ranks: Callable[..., Ranks]) -> None:
        """Answers to the call of one thread were once given to that of another."""
        world = ranks(3)
        count = 20

        def talk(rank: int) -> Any:
            found: list[Any] = []

            def gather() -> None:
                world.in_thread_of(rank)
                for number in range(count):
                    mine = (threading.get_ident(), number)
                    got = smp.allgather(mine)
                    found.append((got[rank] == mine, tuple(got)))

            threads = [threading.Thread(target=gather) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(DEADLINE)
            return found

        results = world.run(talk)
        for found in results:
            assert len(found) == 2 * count
            assert all(is_mine for is_mine, _ in found)
        # Whatever the order, all ranks of one exchange have got the same.
        assert {got for _, got in results[0]} == {got for _, got in results[1]} == {got for _, got in results[2]}

    def test_a_gathering_that_was_given_up_is_not_taken_for_the_next(self, ranks: Callable[..., Ranks]) -> None:
        world = ranks(2)
        receive = world.transports[1].recv_bytes

        def once(*args: Any, **kwargs: Any) -> Any:
            world.transports[1].recv_bytes = receive  # type: ignore[method-assign]
            raise KeyboardInterrupt

        world.transports[1].recv_bytes = once  # type: ignore[method-assign]

        def talk(rank: int) -> Any:
            if rank == 1:
                with pytest.raises(KeyboardInterrupt):
                    smp.allgather("first")
            else:
                smp.allgather("first")
            return smp.allgather("second")

        _, found = world.run(talk)
        assert isinstance(found, MessageError)
        assert "an object of call 1 of smp.allgather came in call 2" in str(found)
