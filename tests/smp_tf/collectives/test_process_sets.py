"""Horovod's process sets for our groups, added in one order on all ranks; in one process, with a Horovod that notes."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from smp_tf.collectives import process_sets
from smp_tf.collectives.process_sets import add_process_sets, exchange_bytes, remove_process_sets, world
from smp_tf.errors import EnvironmentSetupError, PeerError
from smp_tf.partition.mesh import Mesh
from smp_tf.start.start_watch import StartWatch


class FakeHorovod:
    """A world of some ranks that adds sets and gathers bytes as Horovod does."""

    def __init__(self, size: int, says: dict[int, bytes] | None = None) -> None:
        self._size = size
        self._says = says or {}
        self.global_process_set = "world"
        self.added: list[list[int]] = []
        self.removed: list[str] = []
        self.gathered: list[str] = []
        self.error: BaseException | None = None

    def size(self) -> int:
        return self._size

    def add_process_set(self, ranks: list[int]) -> str:
        if ranks in self.added:
            raise ValueError("A process set with ranks was already added")
        self.added.append(ranks)
        return f"set {ranks}"

    def remove_process_set(self, found: str) -> None:
        self.removed.append(found)

    def allgather(self, tensor: tf.Tensor, name: str, process_set: str) -> tf.Tensor:
        assert process_set == self.global_process_set
        if self.error is not None:
            raise self.error
        self.gathered.append(name)
        own = tensor.numpy()
        others = [
            np.array([len(said)], np.int64) if name.endswith("lengths") else np.frombuffer(said, np.uint8)
            for said in self._says.values()
        ]
        return tf.constant(np.concatenate([own, *others]))


@pytest.fixture
def horovod(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeHorovod]:
    def make(*args: Any, **kwargs: Any) -> FakeHorovod:
        made = FakeHorovod(*args, **kwargs)
        monkeypatch.setattr(process_sets, "hvd", made)
        return made

    return make


class TestSets:
    def test_every_rank_adds_all_groups_in_the_same_order(self, horovod: Callable[..., FakeHorovod]) -> None:
        orders = []
        for rank in range(8):
            fake = horovod(8)
            add_process_sets(Mesh(8, 2), rank)
            orders.append(fake.added)
        assert orders == [[[0, 1], [2, 3], [4, 5], [6, 7], [0, 2, 4, 6], [1, 3, 5, 7]]] * 8

    def test_a_rank_knows_its_own_groups(self, horovod: Callable[..., FakeHorovod]) -> None:
        horovod(8)
        sets = add_process_sets(Mesh(8, 2), 5)
        assert (sets.mp, sets.dp) == ("set [4, 5]", "set [1, 3, 5, 7]")
        horovod(8)
        spread = add_process_sets(Mesh(8, 2, "spread"), 5)
        assert (spread.mp, spread.dp) == ("set [1, 5]", "set [4, 5, 6, 7]")

    def test_the_group_of_all_is_horovod_s_own_and_is_not_added(self, horovod: Callable[..., FakeHorovod]) -> None:
        fake = horovod(4)
        split = add_process_sets(Mesh(4, 4), 2)
        assert (split.mp, split.dp, split.owned, fake.added) == ("world", None, (), [])
        copied = add_process_sets(Mesh(4, 1), 2)
        assert (copied.mp, copied.dp, copied.owned, fake.added) == (None, "world", (), [])

    def test_a_group_of_one_needs_no_set(self, horovod: Callable[..., FakeHorovod]) -> None:
        fake = horovod(1)
        sets = add_process_sets(Mesh(1, 1), 0)
        assert (sets.mp, sets.dp, fake.added) == (None, None, [])

    def test_what_was_added_is_removed_and_nothing_else(self, horovod: Callable[..., FakeHorovod]) -> None:
        fake = horovod(4)
        remove_process_sets(add_process_sets(Mesh(4, 2), 0).owned)
        assert fake.removed == ["set [0, 1]", "set [2, 3]", "set [0, 2]", "set [1, 3]"]

    def test_a_set_of_the_script_s_own_in_the_way_is_told(self, horovod: Callable[..., FakeHorovod]) -> None:
        horovod(4).added.append([2, 3])
        with pytest.raises(EnvironmentSetupError, match=r"refuses the group of ranks \[2, 3\]: .* already added") as e:
            add_process_sets(Mesh(4, 2), 0)
        assert "after smp.init()" in str(e.value)


class TestExchange:
    def test_what_the_ranks_said_in_rank_order(self, horovod: Callable[..., FakeHorovod]) -> None:
        fake = horovod(3, {1: b"", 2: b"three"})
        assert exchange_bytes(b"one", "hello") == [b"one", b"", b"three"]
        assert fake.gathered == ["hello.lengths", "hello.bytes"]

    def test_a_world_of_one_asks_nobody(self, horovod: Callable[..., FakeHorovod]) -> None:
        fake = horovod(1)
        assert exchange_bytes(b"one", "hello") == [b"one"]
        assert fake.gathered == []

    def test_too_many_bytes(self, horovod: Callable[..., FakeHorovod]) -> None:
        horovod(2, {1: b""})
        with pytest.raises(ValueError, match="hello: 1048577 bytes are more than 1048576"):
            exchange_bytes(bytes((1 << 20) + 1), "hello")

    @pytest.mark.parametrize(
        "error",
        [process_sets.HorovodInternalError("shut down"), tf.errors.UnknownError(None, None, "shut down")],
        ids=lambda error: type(error).__name__,
    )
    def test_a_rank_that_ended_is_told(self, horovod: Callable[..., FakeHorovod], error: BaseException) -> None:
        horovod(2).error = error
        with pytest.raises(PeerError, match=r"ended while the ranks greeted each other \(hello\)"):
            exchange_bytes(b"one", "hello")


def test_one_process_with_the_real_horovod(init: Callable[..., None]) -> None:
    init()
    assert world() == process_sets.World(rank=0, size=1, local_rank=0, local_size=1)
    assert add_process_sets(Mesh(1, 1), 0).owned == ()
    assert exchange_bytes(b"one", "hello") == [b"one"]
    assert process_sets.built_with() in ("MPI and Gloo", "MPI", "Gloo")


def test_starting_twice_is_starting_once(init: Callable[..., None]) -> None:
    init()
    process_sets.start_horovod(StartWatch(1.0))
    assert process_sets.hvd.is_initialized()


def test_collectives_are_called_with_a_process_set_and_a_name_everywhere() -> None:
    """In all of smp_tf; Horovod's own defaults are the world, and names that depend on the graph."""
    names = ("allreduce", "grouped_allreduce", "allgather", "grouped_allgather", "broadcast", "alltoall")
    collectives = {f"hvd.{name}" for name in names}
    found = []
    for file in sorted(Path(process_sets.__file__).parents[1].rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            # Called itself, or by `collective`, which is given it first.
            called = {ast.unparse(node.func), *(ast.unparse(argument) for argument in node.args[:1])}
            if called & collectives:
                found.append(file.name)
                given = {keyword.arg for keyword in node.keywords}
                # Options that stand for themselves are `**options` there.
                assert "name" in given, f"{file.name}, line {node.lineno}"
                assert given & {"process_set", None}, f"{file.name}, line {node.lineno}"
    assert sorted(set(found)) == ["horovod.py", "process_sets.py"]
