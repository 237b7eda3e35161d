"""Ranks that are fed different batches are noticed: by hashes, on the steps when it is due, never by waiting."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from smp_tf.batch.microbatches import SplitArgument
from smp_tf.job.content_hash import content_hashes
from smp_tf.steps import input_check
from smp_tf.steps.input_check import add_input_check


class Wire:
    """Stands for the transport between the ranks of a replica, inside one graph."""

    def __init__(self, arriving: dict[int, tf.Tensor] | None = None) -> None:
        self.arriving = arriving or {}
        self.sent: list[tuple[int, int]] = []
        self.received: list[tuple[int, int]] = []
        self.values = tf.Variable(tf.zeros([0], tf.int64), shape=[None])
        self.times = tf.Variable(0)

    def send(self, tensor: tf.Tensor, step: tf.Tensor, *, dest: int, edge: int, **where: Any) -> tf.Operation:
        self.sent.append((dest, edge))
        self.values.assign(tensor)
        return self.times.assign_add(1).op

    def recv(self, step: tf.Tensor, dtype: tf.DType, shape: Any, *, src: int, edge: int, **where: Any) -> tf.Tensor:
        self.received.append((src, edge))
        self.times.assign_add(1)
        return tf.identity(self.arriving[src])


def check(
    monkeypatch: pytest.MonkeyPatch, wire: Wire, values: Sequence[Any], stage: int, ranks: Sequence[int] = (4, 6, 8)
) -> Any:
    """A function of the step's number that runs the check on some values."""
    monkeypatch.setattr(input_check, "send_recv", SimpleNamespace(send=wire.send, recv=wire.recv))
    arguments = [SplitArgument(n, 0, tf.type_spec_from_value(v)) for n, v in zip("xy", values, strict=False)]

    @tf.function
    def step(number: tf.Tensor) -> None:
        add_input_check("train", arguments, values, number, 1, ranks, stage)

    return lambda number: step(tf.constant(number, tf.int64))


X, Y = tf.constant([1.0, 2.0]), tf.constant([3, 4])


def hashes(*tensors: tf.Tensor) -> tf.Tensor:
    return content_hashes(tensors)


def test_a_later_stage_sends_its_hashes_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire()
    check(monkeypatch, wire, [X, Y], stage=2)(0)
    assert wire.sent == [(4, (1 << 24) + 2)]
    assert wire.values.numpy().tolist() == hashes(X, Y).numpy().tolist()


def test_the_first_stage_hears_all_others_and_is_content_with_equal_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire({6: hashes(X, Y), 8: hashes(X, Y)})
    check(monkeypatch, wire, [X, Y], stage=0)(0)
    assert wire.received == [(6, (1 << 24) + 1), (8, (1 << 24) + 2)]


def test_another_batch_is_an_error_that_names_argument_ranks_and_step(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire({6: hashes(X, Y), 8: hashes(X, Y + 1)})
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        check(monkeypatch, wire, [X, Y], stage=0)(7)
    words = str(raised.value).replace("\\'", "'")
    assert "In step 'train', argument 'y' on rank 8 differs from that on rank 4." in words
    assert "check_inputs=False. Step:] [7]" in words


def test_composite_arguments_are_compared_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    ragged = tf.ragged.constant([[1, 2], [3]])
    same = hashes(ragged.values, ragged.row_splits)
    other = hashes(ragged.values, tf.constant([0, 1, 3], tf.int64))
    check(monkeypatch, Wire({6: same}), [ragged], stage=0, ranks=(4, 6))(0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="on rank 6 differs from that on rank 4"):
        check(monkeypatch, Wire({6: other}), [ragged], stage=0, ranks=(4, 6))(0)


def test_it_is_due_on_the_first_ten_steps_and_every_hundredth(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire()
    step = check(monkeypatch, wire, [X], stage=1)
    due = []
    for number in [*range(12), 99, 100, 101, 200, 1000, 1010]:
        before = int(wire.times)
        step(number)
        if int(wire.times) > before:
            due.append(number)
    assert due == [*range(10), 100, 200, 1000]


@pytest.mark.parametrize(("values", "ranks"), [([], (4, 6)), ([X], (4,))], ids=["no tensors", "one rank"])
def test_nothing_is_compared_where_there_is_nothing_to_compare(
    monkeypatch: pytest.MonkeyPatch, values: list[tf.Tensor], ranks: tuple[int, ...]
) -> None:
    wire = Wire()
    check(monkeypatch, wire, values, stage=0, ranks=ranks)(0)
    assert wire.sent == wire.received == []


def test_the_pipeline_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire()
    monkeypatch.setattr(input_check, "send_recv", SimpleNamespace(send=wire.send, recv=wire.recv))
    counter = tf.Variable(0)

    @tf.function
    def step(number: tf.Tensor) -> None:
        add_input_check("train", [SplitArgument("x", 0, tf.TensorSpec([2]))], [X], number, 1, (4, 6), 1)
        counter.assign_add(1)

    graph = step.get_concrete_function(tf.constant(0, tf.int64)).graph
    (added,) = [op for op in graph.get_operations() if op.type == "AssignAddVariableOp"]
    assert not any(op.type in ("If", "StatelessIf") for op in added.control_inputs)
    assert any(op.type == "If" for op in graph.get_operations())
