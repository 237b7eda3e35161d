"""What the ops refuse while a graph is built: no processes needed."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops

from smp_tf.ops.errors import LibraryError, NotDifferentiableError
from smp_tf.ops.library import OPS, check_ops, check_tensorflow_version, tf_ops_library
from smp_tf.ops.send_recv import begin_step, recv, send
from smp_tf.partition.graph.op_graph import UNSENDABLE_DTYPES
from tests.ops.tensor_parts import every_dtype

NAMES = {"program": 1, "edge": 0, "microbatch": 0, "label": "tokens"}


def test_strings_are_refused() -> None:
    with pytest.raises(TypeError, match=r"Only numbers and bools.*'tokens' of dtype string"):
        send(tf.constant(["a"]), 0, dest=1, **NAMES)
    with pytest.raises(TypeError, match=r"received between ranks.*dtype variant"):
        recv(0, tf.variant, [], src=1, **NAMES)


def test_only_what_the_planner_never_cuts_cannot_be_sent() -> None:
    """Between quantized layers, or float8 ones, a cut was planned and then refused when the graph was made."""
    refused, refused_by_op = set(), set()
    for dtype in every_dtype():
        with tf.Graph().as_default():
            try:
                recv(0, dtype, [], src=1, **NAMES)
            except TypeError:
                refused.add(dtype.name)
            try:
                tf_ops_library().smp_recv(step=tf.zeros([], tf.int64), T=dtype, shape=[], src=1, **NAMES)
            except ValueError:
                refused_by_op.add(dtype.name)
    assert refused == refused_by_op == UNSENDABLE_DTYPES


def test_their_gradient_is_an_error_with_words() -> None:
    with tf.Graph().as_default():
        y = recv(0, tf.float32, [], src=1, **NAMES)
        gradient = tf_ops.get_gradient_function(y.op)
        with pytest.raises(NotDifferentiableError, match="does not cross ranks by itself"):
            gradient(y.op, tf.ones([]))


def test_sends_are_not_chained_by_automatic_control_dependencies() -> None:
    @tf.function
    def step_fn(x: tf.Tensor) -> tf.Tensor:
        step = begin_step([], 1)
        y = recv(step, tf.float32, [2], src=1, **NAMES)
        send(x, step, dest=1, **NAMES)
        return y

    graph = step_fn.get_concrete_function(tf.TensorSpec([2])).graph
    (sender,) = [op for op in graph.get_operations() if op.type == "SmpSend"]
    (receiver,) = [op for op in graph.get_operations() if op.type == "SmpRecv"]
    assert sender.control_inputs == []
    assert receiver.control_inputs == []
    assert sender in graph.control_outputs
    assert receiver.outputs[0].shape == [2]


def test_without_a_transport_the_op_says_what_to_do() -> None:
    with pytest.raises(tf.errors.FailedPreconditionError, match=r"call smp\.init\(\)"):
        send(tf.ones([]), 0, dest=1, **NAMES)


def test_ops_of_another_tensorflow_are_refused(tmp_path: Path) -> None:
    stamp = tmp_path / "_build.json"
    stamp.write_text(json.dumps({"tensorflow": "2.16.2"}))
    check_tensorflow_version("2.16.2", stamp)
    with pytest.raises(LibraryError, match=r"built against TensorFlow 2\.16\.2, but TensorFlow 2\.21"):
        check_tensorflow_version("2.21.0", stamp)
    with pytest.raises(LibraryError, match="does not say what the ops were built against"):
        check_tensorflow_version("2.21.0", tmp_path / "missing.json")


def test_an_older_build_is_refused() -> None:
    """A checkout that is newer than its libraries failed with an op type that was not registered."""
    check_ops(tf_ops_library(), Path("_tf_ops.so"))
    old = ModuleType("old")
    vars(old).update(dict.fromkeys(OPS[:-2]))
    with pytest.raises(LibraryError, match=r"older than smp_tf: it has no smp_keep, smp_take_kept\. Build them"):
        check_ops(old, Path("_tf_ops.so"))
