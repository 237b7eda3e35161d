"""What a rank waits in is noted for every op of Horovod; and smp_tf calls Horovod through one door."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from smp_tf.collectives import horovod_waits
from smp_tf.collectives.horovod import Horovod
from smp_tf.job import runtime
from smp_tf.ops import collective

ROOT = Path(__file__).resolve().parents[3]

#: Functions that call Horovod themselves, and why nobody has to watch over them there.
EXCEPTIONS = {
    "smp_tf/collectives/process_sets.py exchange_bytes": (
        "runs in smp.init, which StartWatch watches, before there is a transport"
    ),
}


@pytest.fixture
def noted(init: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is noted while a transport is there."""
    init()
    before = runtime.current()
    runtime.install(dataclasses.replace(before, transport=object()))  # type: ignore[arg-type]
    names: list[str] = []

    class Library:
        def smp_come_to(self, collective: str) -> Any:
            names.append(f"to {collective}")
            return tf.no_op() if not tf.executing_eagerly() else None

        def smp_come_through(self, collective: str) -> Any:
            names.append(f"through {collective}")
            return tf.no_op() if not tf.executing_eagerly() else None

    monkeypatch.setattr(collective, "tf_ops_library", Library)
    yield names
    runtime.install(before)


def test_every_way_to_an_op_is_noted(noted: list[str]) -> None:
    hvd.allreduce(tf.ones([2]), name="mean")
    mpi_ops._allreduce(tf.ones([2]))
    hvd.broadcast_object({"a": 1})
    assert noted[:4] == [
        "to hvd.allreduce mean",
        "through hvd.allreduce mean",
        "to hvd.allreduce",
        "through hvd.allreduce",
    ]
    assert {name.split()[1] for name in noted[4:]} == {"hvd.broadcast"}
    assert horovod_waits.members("hvd.allreduce mean") == [0]
    assert horovod_waits.members("smp_gradients") is None


def test_a_long_name_fits_into_what_a_rank_tells_of_itself(noted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end was cut off there, and nobody knew the rest: other ranks were asked than those who take part."""
    in_set = {0: [0, 1], 7: [1, 3]}
    monkeypatch.setattr(mpi_ops._basics, "_get_process_set_ids_and_ranks", lambda: in_set)
    found = set()
    for called in ("a" * 150, "a" * 149 + "b", "\u00e4" * 75, "\u00e4" * 74 + "o"):
        for number, ranks in in_set.items():
            words = horovod_waits._words("grouped_reducescatter", called, number)
            assert len(words.encode()) <= 100
            assert horovod_waits.members(words) == ranks
            found.add(words)
    assert len(found) == 8
    hvd.allreduce(tf.ones([2]), name="a" * 150)
    assert noted[0] == f"to {horovod_waits._words('allreduce', 'a' * 150, 0)}"


def test_process_sets_are_known_by_the_words_alone() -> None:
    """A table of names grew with every new one, such as those that count."""
    assert horovod_waits._words("allreduce", "x", 3) == "hvd.allreduce of process set 3: x"
    assert horovod_waits._words("join", None, 0) == "hvd.join"
    tables = (dict, list, set)
    assert [n for n, v in vars(horovod_waits).items() if isinstance(v, tables) and n[0] == "_" and n[1:2] != "_"] == [
        "_FUNCTIONS"
    ]


def test_an_op_in_a_function_is_noted_when_that_runs(noted: list[str]) -> None:
    @tf.function
    def function(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = mpi_ops._allreduce(x, name="inside")
        return tape.gradient(y, x)

    function.get_concrete_function(tf.TensorSpec([2]))
    assert noted[:2] == ["to hvd.allreduce inside", "through hvd.allreduce inside"]
    # And the one that its gradient makes.
    assert len(noted) == 4, noted


def test_smp_tfs_own_have_one_name(noted: list[str]) -> None:
    Horovod().all_gather(tf.ones([2]), hvd.global_process_set, "own")
    assert noted == ["to own", "through own"]


def test_a_collective_that_fails_is_over(noted: list[str]) -> None:
    with pytest.raises((TypeError, tf.errors.OpError)):
        hvd.allgather(tf.constant(["text"]), name="texts")
    assert noted == ["to hvd.allgather texts", "through hvd.allgather texts"]


#: Functions of Horovod in which a rank waits for others.
_WAITING = {
    "allgather", "allgather_object", "allreduce", "alltoall", "broadcast", "broadcast_", "broadcast_object",
    "broadcast_variables", "grouped_allgather", "grouped_allreduce", "grouped_reducescatter", "join", "reducescatter",
}  # fmt: skip

#: What modules are called that have them.
_MODULES = ("hvd", "mpi_ops", "horovod.tensorflow", "ops.MPI_LIB", "mpi_ops.MPI_LIB")


def test_all_collectives_of_horovod_are_known() -> None:
    ops = {name.removeprefix("horovod_") for name in dir(mpi_ops.MPI_LIB) if name.startswith("horovod_")}
    ops = {name for name in ops if not name.endswith("_eager_fallback")}
    said = {"size", "rank", "local_size", "local_rank", "process_set_included"}
    inplace = {"broadcast_inplace", "broadcast_inplace_resource"}
    assert ops - said - inplace <= _WAITING
    assert {f"horovod_{name}" for name in ops - said} <= set(horovod_waits._FUNCTIONS)


def test_smp_tf_calls_horovods_collectives_through_one_door() -> None:
    """A broadcast that did not was watched by nobody."""
    found: list[str] = []
    seen = 0
    for folder in ("smp_tf", "pipeline", "partition", "ops", "smdistributed"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for outermost in ast.parse(path.read_text()).body:
                handed = {
                    id(call.args[0])
                    for call in ast.walk(outermost)
                    if isinstance(call, ast.Call) and call.args and ast.unparse(call.func).endswith("collective")
                }
                for node in ast.walk(outermost):
                    is_horovods = isinstance(node, ast.Attribute) and node.attr in _WAITING
                    if not is_horovods or ast.unparse(node.value) not in _MODULES:
                        continue
                    seen += 1
                    place = f"{path.relative_to(ROOT)} {getattr(outermost, 'name', '')}"
                    if id(node) not in handed and place not in EXCEPTIONS:
                        found.append(f"{place}: {ast.unparse(node)}, line {node.lineno}")
    assert seen >= 6
    assert found == [], "call the methods of smp_tf/collectives/interface.py, or note here why nobody has to watch"
