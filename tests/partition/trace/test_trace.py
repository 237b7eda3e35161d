"""What is written down while a step function is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from smp_tf.partition import tf_internals
from smp_tf.partition.graph.op_graph import Call
from smp_tf.partition.trace.trace import OpSpan, Recorder, Trace, trace
from tests.partition.traced_step import FLOATS, step_graph, traced


class Announcing:
    """A scope to trace in, which hands its recorder to the step function."""

    def __init__(self, recorder: Recorder) -> None:
        Announcing.recorder = recorder

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass


def recorded(function: Callable[[Recorder, tf.Tensor], Any]) -> Trace:
    """The trace of a function of the recorder and a tensor."""
    return trace(
        lambda x: function(Announcing.recorder, x),
        [FLOATS],
        lambda body, tensors: body(*tensors),
        scopes=Announcing,
        autograph=False,
    )


def made_in(result: Trace, span: OpSpan) -> list[str]:
    """Types of the ops made within a span."""
    return [op.type for op in result.graph.get_operations()[span.start : span.end]]


# --- layer calls ----------------------------------------------------------------------------------------------------


def test_calls_are_numbered_in_order_with_paths_parents_and_the_ops_made_in_them() -> None:
    open_calls: list[bool] = []

    def step(recorder: Recorder, x: tf.Tensor) -> tf.Tensor:
        open_calls.append(recorder.in_call)
        with recorder.call("net", "Model"):
            open_calls.append(recorder.in_call)
            x = tf.nn.relu(x)
            with recorder.call("dense", "Dense"):
                x = tf.tanh(x)
            with recorder.call("dense", "Dense"):
                x = tf.sigmoid(x)
        open_calls.append(recorder.in_call)
        return tf.negative(x)

    result = recorded(step)
    assert open_calls == [False, True, False]
    assert result.recorder.calls == [
        Call(0, "", "", None),
        Call(1, "net", "Model", 0),
        Call(2, "net/dense", "Dense", 1),
        Call(3, "net/dense", "Dense", 1),
    ]
    assert [(s.call, made_in(result, s)) for s in result.recorder.call_spans] == [
        (1, ["Relu", "Tanh", "Sigmoid"]),
        (2, ["Tanh"]),
        (3, ["Sigmoid"]),
    ]


def test_a_stage_asked_for_holds_for_the_calls_within_until_another_is_asked_for() -> None:
    def step(recorder: Recorder, x: tf.Tensor) -> tf.Tensor:
        with recorder.call("net", "Model"):
            with recorder.call("a", "Dense", stage=1):
                with recorder.call("b", "Dense"):
                    pass
                with recorder.call("c", "Dense", stage=0):
                    pass
            with recorder.call("d", "Dense"):
                return x + 1.0

    stages = [(c.path, c.stage) for c in recorded(step).recorder.calls[1:]]
    assert stages == [("net", None), ("net/a", 1), ("net/a/b", 1), ("net/a/c", 0), ("net/d", None)]


def test_a_call_that_raises_is_closed() -> None:
    def step(recorder: Recorder, x: tf.Tensor) -> tf.Tensor:
        with contextlib.suppress(KeyError), recorder.call("net", "Model", stage=1):
            x = tf.tanh(x)
            raise KeyError
        assert not recorder.in_call
        with recorder.call("other", "Model"):
            return tf.nn.relu(x)

    result = recorded(step)
    assert [made_in(result, s) for s in result.recorder.call_spans] == [["Tanh"], ["Relu"]]
    assert result.recorder.calls[2] == Call(2, "other", "Model", 0, None)


# --- gradients ------------------------------------------------------------------------------------------------------


def test_ops_made_by_a_tape_are_backward_and_its_results_gradients_of_the_variables() -> None:
    w, v = tf.Variable(tf.ones([8, 8])), tf.Variable(tf.ones([8]))
    unused = tf.Variable(1.0)
    taken: list[Any] = []

    def step(recorder: Recorder, x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.matmul(x, w) + v)
        taken.extend(tape.gradient(loss, [w, x, unused, v]))
        return tf.square(loss)

    result = recorded(step)
    (span,) = result.recorder.backward_spans
    types = made_in(result, span)
    assert types.count("MatMul") == 2
    assert "Square" not in types
    # Of variables only, and only where there is a gradient.
    noted = [(id(g.variable), [id(t) for t in g.tensors]) for g in result.recorder.gradients]
    assert noted == [(id(w), [id(taken[0])]), (id(v), [id(taken[3])])]


@pytest.mark.parametrize("nested", [[], {"w": None}, None])
def test_sources_may_be_nested_or_single(nested: Any) -> None:
    w = tf.Variable(tf.ones([8, 8]))
    taken: list[Any] = []

    def step(recorder: Recorder, x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.matmul(x, w))
        sources: Any = [w] if nested == [] else {"w": w} if nested else w
        taken.append(tape.gradient(loss, sources))
        return loss

    (gradient,) = recorded(step).recorder.gradients
    assert gradient.variable is w
    assert gradient.tensors[0] is tf.nest.flatten(taken[0])[0]


def test_a_sparse_gradient_is_noted_as_values_indices_and_shape() -> None:
    table = tf.Variable(tf.ones([20, 8]))
    taken: list[Any] = []

    def step(recorder: Recorder, x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, tf.cast(x, tf.int32)))
        taken.append(tape.gradient(loss, table))
        return loss

    (gradient,) = recorded(step).recorder.gradients
    assert isinstance(taken[0], tf.IndexedSlices)
    assert [id(t) for t in gradient.tensors] == [
        id(t) for t in (taken[0].values, taken[0].indices, taken[0].dense_shape)
    ]


def test_tf_gradients_are_backward_too() -> None:
    w = tf.Variable(tf.ones([8, 8]))

    def step(recorder: Recorder, x: tf.Tensor) -> Any:
        loss = tf.reduce_sum(tf.matmul(x, w))
        return tf.gradients(loss, [w])[0]

    result = recorded(step)
    (span,) = result.recorder.backward_spans
    assert made_in(result, span).count("MatMul") == 2
    assert result.recorder.call_spans == []
    assert [g.variable is w for g in result.recorder.gradients] == [True]


@pytest.mark.parametrize("method", ["jacobian", "batch_jacobian"])
def test_jacobians_are_backward_but_no_gradients(method: str) -> None:
    def step(recorder: Recorder, x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.square(x)
        # TensorFlow calls the argument `sources` in one and `source` in the other.
        keyword = {"jacobian": "sources", "batch_jacobian": "source"}[method]
        return getattr(tape, method)(y, **{keyword: x})

    result = recorded(step)
    assert result.recorder.gradients == []
    *_, span = result.recorder.backward_spans  # TensorFlow takes a gradient within, of one row
    assert "Square" not in made_in(result, span)
    assert span.start < result.graph.get_operations().index(result.results.op) < span.end


def test_a_jacobian_of_a_variable_leaves_no_gradient_that_the_step_returns() -> None:
    """TensorFlow takes the gradient of one row to find out which ops to repeat, and throws its tensors away."""
    w = tf.Variable(tf.ones([8]))

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(x, 0) * w
        return tape.jacobian(y, w)

    assert step_graph(step, FLOATS).gradients == ()


def test_gradient_functions_say_which_forward_op_they_differentiate() -> None:
    def step(recorder: Recorder, x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.tanh(x, name="forward_tanh")
            z = tf.nn.relu(y)
        return tape.gradient(z, x)

    result = recorded(step)
    spans = result.recorder.function_spans
    assert [(s.op_type, made_in(result, s)) for s in spans] == [("Relu", ["ReluGrad"]), ("Tanh", ["TanhGrad"])]
    assert [[t.op.type for t in s.outputs] for s in spans] == [["Relu"], ["Tanh"]]


def test_gradients_taken_in_the_body_of_another_function_are_not_the_steps() -> None:
    """Inside a loop's body the tape works on the body's graph, whose ops the step's graph does not hold."""

    def body(i: tf.Tensor, x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.tanh(x)
        return i + 1, tape.gradient(y, x)

    def step(recorder: Recorder, x: tf.Tensor) -> Any:
        return tf.while_loop(lambda i, _: i < 3, body, [0, x])[1]

    recorder = recorded(step).recorder
    assert (recorder.backward_spans, recorder.function_spans, recorder.gradients) == ([], [], [])


# --- the trace itself -----------------------------------------------------------------------------------------------


def test_arguments_are_the_tensors_of_the_step_also_unused_ones_and_parts_of_composites() -> None:
    captured = tf.constant(2.0)
    ragged = tf.RaggedTensorSpec([4, None], tf.float32, ragged_rank=1)
    result = traced(lambda x, unused, r: (x * captured, r), FLOATS, tf.TensorSpec([], tf.bool), ragged)
    assert [t.dtype.name for t in result.arguments] == ["float32", "bool", "float32", "int64"]
    values, splits = result.function(tf.ones([4, 8]), tf.constant(True), tf.ragged.constant([[1.0], [], [2.0], [3.0]]))[
        1:
    ]
    assert (values.numpy().tolist(), splits.numpy().tolist()) == ([1.0, 2.0, 3.0], [0, 1, 1, 2, 3])


def test_results_keep_their_structure_and_what_is_no_tensor() -> None:
    counter = tf.Variable(3)
    outside = tf.constant([7.0])
    result = traced(lambda x: {"x": x, "none": None, "number": 3, "text": "a", "list": (counter, [outside])}, FLOATS)
    found = result.results
    assert (found["none"], found["number"], found["text"]) == (None, 3, "a")
    assert all(t.graph is result.graph for t in (found["x"], found["list"][0], found["list"][1][0]))
    numbers = [np.asarray(t).tolist() for t in result.function(tf.zeros([4, 8]))]
    assert sorted(map(str, numbers)) == sorted(map(str, [3, [7.0], np.zeros([4, 8]).tolist()]))


def test_ops_that_tensorflow_adds_for_returning_come_after_the_length() -> None:
    result = traced(lambda x: (x, x), FLOATS)
    operations = result.graph.get_operations()
    assert [op.type for op in operations[: result.length]] == ["Placeholder"]
    assert all(op.type == "Identity" for op in operations[result.length :])


def test_python_control_flow_over_tensors_is_converted_unless_told_not_to() -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        if tf.reduce_sum(x) > 0:
            return x
        return -x

    assert "StatelessIf" in [op.type for op in traced(step, FLOATS, autograph=True).graph.get_operations()]
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        traced(step, FLOATS, autograph=False)


def test_functions_called_in_the_step_are_traced_into_it() -> None:
    inner = tf.function(lambda x: tf.tanh(x))
    types = [op.type for op in traced(lambda x: inner(x), FLOATS).graph.get_operations()]
    assert "Tanh" in types
    assert "PartitionedCall" not in types


@pytest.mark.parametrize("fails", [False, True])
def test_tensorflow_is_as_before_afterwards(fails: bool) -> None:
    def now() -> list[Any]:
        tape = tf.GradientTape
        watched = [tape.gradient, tape.jacobian, tape.batch_jacobian, tf_internals.gradients_util._GradientsHelper]
        functions = [tf_internals.gradients_util._MaybeCompile, tf_internals.record.record_operation]
        return [*watched, *functions, tf_internals.polymorphic_function.Function.__call__]

    def step(x: tf.Tensor) -> tf.Tensor:
        assert now() != before
        if fails:
            raise KeyError("stop")
        return x

    before = now()
    if fails:
        with pytest.raises(KeyError):
            traced(step, FLOATS)
    else:
        traced(step, FLOATS)
    assert now() == before


def test_the_function_carries_the_name_given() -> None:
    result = trace(
        lambda x: x, [FLOATS], lambda body, tensors: body(*tensors), scopes=Announcing, autograph=False, name="my_step"
    )
    assert "my_step" in result.graph.name
