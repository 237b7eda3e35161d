"""The private TensorFlow that this library relies on is there and does what each wrapper says.

A failure here after an upgrade of TensorFlow names the piece that changed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.core.framework import function_pb2
from tensorflow.python.autograph.core import config as autograph_config
from tensorflow.python.eager import context as eager_context
from tensorflow.python.ops import gradients_util

from smp_tf.partition import tf_internals


def ops_of(function: Callable[..., Any], *specs: tf.TensorSpec) -> list[tf.Operation]:
    """Ops of a function, traced without AutoGraph."""
    return list(tf.function(function, autograph=False).get_concrete_function(*specs).graph.get_operations())


FLOATS = tf.TensorSpec([4, 8], tf.float32)


class Notes:
    """Notes what gradient functions are called for, and how many ops each made."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []
        self.outputs: list[list[str]] = []
        self.inputs: list[list[str]] = []
        self.made: list[list[str]] = []

    @contextlib.contextmanager
    def __call__(self, inputs: Any, outputs: Any, op_type: str, scope: str) -> Iterator[None]:
        graph = tf_internals.current_graph()
        start = graph.version
        yield
        self.found.append((op_type, scope))
        self.inputs.append([t.op.type for t in inputs or () if t is not None])
        self.outputs.append([t.op.type for t in outputs or () if t is not None])
        self.made.append([op.type for op in graph.get_operations()[start:]])


def test_gradient_functions_of_a_tape_are_watched_with_type_scope_and_tensors() -> None:
    notes = Notes()

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            with tf.name_scope("outer"), tf.name_scope("inner"):
                y = tf.nn.relu(tf.tanh(x))
        with tf_internals.watch_gradient_functions(notes):
            result = tape.gradient(y, x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.sigmoid(x)
        tape.gradient(y, x)  # not watched any more
        return result

    ops_of(step, FLOATS)
    assert notes.found == [("Relu", "outer/inner"), ("Tanh", "outer/inner")]
    assert notes.outputs == [["Relu"], ["Tanh"]]
    assert notes.made == [["ReluGrad"], ["TanhGrad"]]


def test_gradient_functions_that_tf_gradients_calls_are_watched() -> None:
    notes = Notes()

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.name_scope("outer"):
            y = tf.tanh(x)
        with tf_internals.watch_gradient_functions(notes):
            return tf.gradients(y, x)[0]

    ops_of(step, FLOATS)
    assert notes.found == [("Tanh", "outer")]
    assert (notes.inputs, notes.outputs) == ([["Placeholder"]], [["Tanh"]])
    assert notes.made == [["TanhGrad"]]


def test_gradient_functions_are_not_watched_after_an_error() -> None:
    original = gradients_util._MaybeCompile
    notes = Notes()
    with contextlib.suppress(KeyError), tf_internals.watch_gradient_functions(notes):
        assert gradients_util._MaybeCompile is not original
        raise KeyError
    assert gradients_util._MaybeCompile is original
    x = tf.constant(1.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.tanh(x)
    assert tape.gradient(y, x).numpy() == pytest.approx(0.41997, abs=1e-4)
    assert notes.found == []


def test_symbolic_gradients_are_handed_over_with_their_sources() -> None:
    seen: list[Any] = []

    def note(compute: Callable[[], Any], sources: Any) -> Any:
        seen.append([t.op.type for t in tf.nest.flatten(sources)])
        results = compute()
        seen.append([t.op.type for t in results])
        return results

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf_internals.watch_symbolic_gradients(note):
            result = tf.gradients(tf.tanh(x), [x])[0]
        tf.gradients(tf.tanh(x), [x])
        return result

    ops_of(step, FLOATS)
    assert seen == [["Placeholder"], ["TanhGrad"]]


def test_backward_functions_handed_to_the_tape_are_watched() -> None:
    """Those of custom gradients, of recomputation and of calls of functions."""
    notes = Notes()

    @tf.custom_gradient
    def custom(x: tf.Tensor) -> Any:
        return tf.sin(x), lambda upstream: tf.cosh(upstream)

    called = tf.function(lambda x: tf.tan(x), autograph=False)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf_internals.watch_recorded_operations(notes), tf.GradientTape() as tape:
            tape.watch(x)
            y = called(tf.recompute_grad(lambda z: tf.exp(z))(custom(x)))
        return tape.gradient(y, x)

    ops_of(step, FLOATS)
    assert len(notes.found) >= 3
    made = ["".join(types) for types in notes.made]
    assert any("PartitionedCall" in types for types in made)
    assert any("Exp" in types for types in made)
    assert any("Cosh" in types for types in made)
    index = next(i for i, types in enumerate(made) if "Cosh" in types)
    assert "Placeholder" in notes.inputs[index]
    assert set(notes.outputs[index]) == {"IdentityN"}  # which a custom gradient puts around its results


def test_calls_of_functions_are_inlined_but_not_compiled_ones_and_those_with_attributes() -> None:
    plain = tf.function(lambda x: tf.tanh(x))
    compiled = tf.function(lambda x: tf.sinh(x), jit_compile=True)
    attributed = tf.function(lambda x: tf.cosh(x), experimental_attributes={"_noinline": True})

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf_internals.inline_functions():
            y = plain(x) + compiled(x) + attributed(x)
        return y + plain(x)  # no longer

    types = [op.type for op in ops_of(step, FLOATS)]
    assert types.count("Tanh") == 1
    assert "Sinh" not in types
    assert "Cosh" not in types
    assert sum("PartitionedCall" in t for t in types) == 3


def test_an_inlined_functions_python_control_flow_is_converted_unless_it_asked_not_to_be() -> None:
    def body(x: tf.Tensor) -> tf.Tensor:
        return x if tf.reduce_sum(x) > 0 else -x

    def step(function: Any) -> Callable[[tf.Tensor], tf.Tensor]:
        def calls(x: tf.Tensor) -> tf.Tensor:
            with tf_internals.inline_functions():
                return function(x)

        return calls

    assert any("If" in op.type for op in ops_of(step(tf.function(body)), FLOATS))
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        ops_of(step(tf.function(body, autograph=False)), FLOATS)


@pytest.mark.parametrize(
    ("op", "stateful"),
    [
        ("MatMul", False),
        ("RandomUniform", True),
        ("StatelessRandomUniform", False),
        ("AssignVariableOp", True),
        ("PrintV2", True),
        ("While", True),
        ("StatelessWhile", False),
        ("NoSuchOpAnywhere", True),
    ],
)
def test_ops_are_registered_as_stateful_or_not(op: str, stateful: bool) -> None:
    assert tf_internals.is_stateful(op) is stateful


def test_the_resources_an_op_reads_and_writes_are_told_apart_also_within_functions() -> None:
    a, b = tf.Variable(1.0), tf.Variable(1.0)

    def step(x: tf.Tensor) -> tf.Tensor:
        a.assign_add(1.0)
        return tf.cond(x > 0, lambda: a.read_value(), lambda: b.assign(2.0))

    graph = tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([], tf.float32)).graph
    handle = {inside.op.name: "a" if outside is a.handle else "b" for outside, inside in graph.captures}

    def uses(op_type: str) -> tuple[list[str], list[str]]:
        op = next(op for op in graph.get_operations() if op.type == op_type)
        reads, writes = tf_internals.resource_uses(op)
        return [handle[t.op.name] for t in reads], [handle[t.op.name] for t in writes]

    assert uses("AssignAddVariableOp") == ([], ["a"])
    assert uses("If") == (["a"], ["b"])


def test_the_entries_of_a_list_are_known_of_the_list_alone() -> None:
    with tf.Graph().as_default():
        rows = tf.raw_ops.TensorListFromTensor(tensor=tf.zeros([4, 2, 3], tf.float64), element_shape=[2, 3])
        assert tf_internals.list_entry(rows) == (tf.float64, tf.TensorShape([2, 3]))
        assert tf_internals.list_entry(tf.raw_ops.OptionalNone()) is None


def test_a_tensor_from_outside_is_captured_once() -> None:
    outside = tf.Variable([1.0, 2.0]).handle
    seen: list[tf.Tensor] = []

    def step() -> tf.Tensor:
        graph = tf_internals.current_graph()
        seen.extend(tf_internals.capture(graph, outside) for _ in range(2))
        return tf.raw_ops.ReadVariableOp(resource=seen[0], dtype=tf.float32) * 2.0

    function = tf.function(step, autograph=False).get_concrete_function()
    assert seen[0] is seen[1]
    assert seen[0].op.type == "Placeholder"
    assert [t is outside for t in function.graph.external_captures] == [True]
    assert function().numpy().tolist() == [2.0, 4.0]


def test_the_current_graph_is_that_of_the_function_being_traced_and_counts_its_ops() -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        graph = tf_internals.current_graph()
        assert graph is x.graph
        before = graph.version
        y = tf.tanh(x) + 1.0
        # Spans are written down as numbers of ops.
        assert graph.version == before + 3
        assert [op.type for op in graph.get_operations()[before:]] == ["Tanh", "Const", "AddV2"]
        return y

    ops_of(step, FLOATS)


def test_python_control_flow_is_converted_within_a_function_that_does_not_convert() -> None:
    def body(x: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(3):
            if tf.reduce_sum(x) > 0:
                x = tf.tanh(x)
        return x

    assert any("While" in op.type for op in ops_of(tf_internals.autograph_convert(body), FLOATS))
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        ops_of(body, FLOATS)


def test_a_module_left_unconverted_is_called_as_it_is() -> None:
    module = ModuleType("left_unconverted_by_test")
    exec("def absolute(x):\n    return x if x > 0 else -x", module.__dict__)
    rules = autograph_config.CONVERSION_RULES
    try:
        tf_internals.leave_unconverted("left_unconverted_by_test")
        once = autograph_config.CONVERSION_RULES
        assert len(once) == len(rules) + 1
        tf_internals.leave_unconverted("left_unconverted_by_test")
        assert autograph_config.CONVERSION_RULES is once
        with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
            ops_of(tf_internals.autograph_convert(lambda x: module.absolute(x)), tf.TensorSpec([], tf.float32))
    finally:
        autograph_config.CONVERSION_RULES = rules


def test_a_call_with_the_attributes_of_another_gives_results_whose_shapes_nobody_looked_for() -> None:
    double = tf.function(lambda x: tf.concat([x, x], 0)).get_concrete_function(tf.TensorSpec([3]))

    @tf.function
    def two_calls(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        first = double(x)
        call = first.op.graph.create_op(
            first.op.type, [y], [tf.float32], attrs=tf_internals.attributes_of_call(first.op)
        )
        assert first.shape == [6]
        assert call.outputs[0].shape.rank is None
        return first, call.outputs[0]

    first, second = two_calls(tf.constant([1.0, 2.0, 3.0]), tf.constant([4.0, 5.0, 6.0]))
    assert first.numpy().tolist() == [1.0, 2.0, 3.0] * 2
    assert second.numpy().tolist() == [4.0, 5.0, 6.0] * 2


def test_the_options_of_a_call_are_those_that_tensorflow_gives_to_its_own() -> None:
    function = tf.function(lambda x: x + 1.0).get_concrete_function(FLOATS)

    @tf.function
    def call(x: tf.Tensor) -> tf.Tensor:
        result = function(x)
        options = tf_internals.call_options()
        assert sorted(options) == ["config_proto", "executor_type"]
        assert {name: result.op.get_attr(name) for name in options} == options
        return result

    call.get_concrete_function(FLOATS)


def test_a_function_written_by_hand_can_be_called_after_it_was_registered() -> None:
    original = tf.function(lambda x: x * 3.0, autograph=False).get_concrete_function(tf.TensorSpec([], tf.float32))
    definition = function_pb2.FunctionDef()
    definition.CopyFrom(original.function_def)
    definition.signature.name = "smp_test_registered_by_hand"

    @tf.function(autograph=False)
    def call(x: tf.Tensor) -> tf.Tensor:
        written = tf.compat.v1.GraphDef()
        written.versions.CopyFrom(original.graph.as_graph_def().versions)
        written.library.function.append(definition)
        node = written.node.add(name="call", op="PartitionedCall", input=["x:0"])
        node.attr["Tin"].list.type.append(1)
        node.attr["Tout"].list.type.append(1)
        node.attr["f"].func.name = definition.signature.name
        return tf.graph_util.import_graph_def(written, {"x:0": x}, ["call:0"], name="")[0]

    first, second = (tf_internals.KeptFunctions([definition]) for _ in range(2))
    del first
    assert call(tf.constant(2.0)).numpy() == 6.0
    del second
    assert not eager_context.context().has_function(definition.signature.name)


def test_a_traced_function_outlives_its_graph() -> None:
    outside = tf.Variable(3.0)

    def body(x: tf.Tensor) -> list[tf.Tensor]:
        return [x * outside, tf.while_loop(lambda y: y < 100.0, lambda y: [y * 2.0], [x])[0]]

    traced = tf.function(body, autograph=False).get_concrete_function(tf.TensorSpec([], tf.float32))
    [loop] = [op for op in traced.graph.get_operations() if "While" in op.type]
    of_loop = traced.graph.as_graph_def().library.function
    assert loop.get_attr("body").name in [function.signature.name for function in of_loop]
    function = tf_internals.TracedFunction(traced, tf_internals.KeptFunctions(of_loop))
    graph = weakref.ref(traced.graph)
    del traced, loop
    gc.collect()
    assert graph() is None
    assert [value.numpy() for value in function(2.0)] == [6.0, 128.0]
    assert [value.numpy() for value in tf.function(lambda: function(tf.constant(2.0)))()] == [6.0, 128.0]
    assert "While" in " ".join(op.type for op in function.graph.get_operations())


def test_xla_says_whether_and_why_not_it_can_compile() -> None:
    spec = tf.TensorSpec([None, 2])
    variable = tf.Variable([1.0, 2.0])

    def asked(body: Any, *specs: tf.TensorSpec) -> str | None:
        return tf_internals.why_xla_cannot(tf.function(body, jit_compile=True), specs, 3)

    assert asked(lambda x: x * variable, spec) is None
    assert asked(lambda x: x + tf.constant(1.0), tf.TensorSpec([])) is None
    reason = asked(lambda x: tf.py_function(lambda v: v, [x], tf.float32), spec)
    assert reason is not None
    assert reason.startswith("EagerPyFunc (No registered 'EagerPyFunc' OpKernel for XLA_CPU_JIT")
    assert asked(lambda x: x, tf.TensorSpec(None)) == "it takes a tensor of unknown rank"


def test_xla_is_asked_where_ops_are_deterministic_and_nothing_is_seeded() -> None:
    """TensorFlow made a random number to find out the device, and refused it: the first test on a GPU that asked."""
    lines = [
        "import tensorflow as tf",
        "from smp_tf.partition import tf_internals",
        "tf.config.experimental.enable_op_determinism()",
        "function = tf.function(lambda x: x * 2.0, jit_compile=True)",
        "assert tf_internals.why_xla_cannot(function, [tf.TensorSpec([2])], 3) is None",
    ]
    ended = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_variables_are_made_in_any_trace_of_a_function() -> None:
    made, value = [], tf.zeros([0])

    @tf.function
    def traced(x: tf.Tensor) -> tf.Tensor:
        made.append(tf_internals.make_plain_variable(initial_value=value, trainable=False, shape=tf.TensorShape(None)))
        return x

    traced(tf.ones([1]))
    traced(tf.ones([2]))
    assert [(variable.numpy().tolist(), variable.trainable) for variable in made] == [([], False)] * 2


def test_types_are_inferred_from_a_placeholder_of_a_list_or_a_variable() -> None:
    with tf.Graph().as_default():
        listed = tf_internals.typed_placeholder("variant", (), ("float32", (2, 3)))
        taken = tf.raw_ops.TensorListPopBack(
            input_handle=listed, element_shape=tf.constant(-1), element_dtype=tf.float32
        )
        assert taken.tensor.shape == (2, 3)
        assert tf_internals.list_entry(taken.output_handle) == (tf.float32, tf.TensorShape([2, 3]))
        handle = tf_internals.typed_placeholder("resource", (), ("float32", (4, None)))
        assert tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32).shape.as_list() == [4, None]
        assert tf_internals.typed_placeholder("int32", None, None).shape.rank is None


def test_the_outputs_of_an_op_type_are_known_in_order() -> None:
    assert [output.name for output in tf_internals.op_definition("TopKV2").output_arg] == ["values", "indices"]
    with pytest.raises(KeyError, match="NoSuchOp"):
        tf_internals.op_definition("NoSuchOp")


@pytest.mark.parametrize(("switch", "found"), [("0", "False"), pytest.param("1", "True", marks=pytest.mark.full)])
def test_it_is_known_whether_onednn_computes(switch: str, found: str) -> None:
    script = "from smp_tf.partition import tf_internals; print(tf_internals.has_onednn())"
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": switch}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == found
