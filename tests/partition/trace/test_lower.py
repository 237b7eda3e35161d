"""From TensorFlow's graph to the op graph: calls, directions, sources, variables, effects, order."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers

from smp_tf.partition.errors import TraceError
from smp_tf.partition.graph.op_graph import (
    ARGUMENT,
    CAPTURE,
    SOURCES,
    VARIABLE,
    Call,
    Gradient,
    Node,
    OpGraph,
    Tensor,
    TensorType,
    Variable,
)
from smp_tf.partition.trace.lower import OutputSlot, _in_topological_order, lower
from tests.partition.traced_step import FLOATS, lowered, named, of_type, step_graph, traced


def dense(name: str) -> Any:
    return layers.Dense(8, name=name)


def gradients_of(model: Any) -> Any:
    """A step that returns a loss and its gradients."""

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x, training=True)))
        return loss, tape.gradient(loss, model.trainable_variables)

    return step


def paths(graph: OpGraph, op: str, backward: bool = False) -> list[str]:
    """Paths of the calls of all ops of a type, in order."""
    return [graph.calls[n.call].path for n in of_type(graph, op) if n.backward == backward]


def built(model: Any) -> Any:
    model(tf.zeros([4, 8]))
    return model


class Calls(tf_keras.Model):
    """A model whose `call` is the function given."""

    def __init__(self, call: Any, **parts: Any) -> None:
        super().__init__(name="net")
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = call
        self(tf.zeros([4, 8]))

    def call(self, x: tf.Tensor, training: Any = None) -> tf.Tensor:
        return self.function(self, x)


# --- layer calls ----------------------------------------------------------------------------------------------------


def test_ops_belong_to_the_innermost_call() -> None:
    inner = tf_keras.Sequential([dense("a"), dense("b")], name="inner")
    model = Calls(lambda self, x: tf.nn.relu(self.last(tf.tanh(self.inner(x)))), inner=inner, last=dense("last"))
    graph = step_graph(lambda x: tf.abs(model(tf.sigmoid(x))), FLOATS, models=[model])
    assert paths(graph, "MatMul") == ["net/inner/a", "net/inner/b", "net/last"]
    assert [paths(graph, op) for op in ("Sigmoid", "Tanh", "Relu", "Abs")] == [[""], ["net"], ["net"], [""]]
    assert [(c.path, c.class_name, c.parent) for c in graph.calls] == [
        ("", "", None),
        ("net", "Calls", 0),
        ("net/inner", "Sequential", 1),
        ("net/inner/a", "Dense", 2),
        ("net/inner/b", "Dense", 2),
        ("net/last", "Dense", 1),
    ]
    assert paths(graph, VARIABLE) == [""] * 6


def test_a_functional_models_layers_are_tagged() -> None:
    given = tf_keras.Input([8])
    left, right = dense("left")(given), dense("right")(given)
    model = tf_keras.Model(given, layers.Add(name="add")([left, right]), name="net")
    graph = step_graph(gradients_of(model), FLOATS, models=[model])
    assert sorted(paths(graph, "MatMul")) == ["net/left", "net/right"]
    assert sorted(paths(graph, "MatMul", backward=True)) == ["net/left", "net/right"]


def test_a_layer_called_twice_makes_two_calls_and_each_backward_op_belongs_to_its_own() -> None:
    model = Calls(lambda self, x: self.a(self.b(self.a(x))), a=dense("a"), b=dense("b"))
    graph = step_graph(gradients_of(model), FLOATS, models=[model])
    assert [n.call for n in of_type(graph, "MatMul") if not n.backward] == [2, 3, 4]
    assert [graph.calls[i].path for i in (2, 3, 4)] == ["net/a", "net/b", "net/a"]
    # From the last call to the first; of the first only the weight's gradient is needed.
    assert [n.call for n in of_type(graph, "MatMul") if n.backward] == [4, 4, 3, 3, 2]
    for node in graph.nodes:
        if node.op == "MatMul" and node.backward:
            assert node.forward_of is not None
            forward = graph.nodes[node.forward_of]
            assert (forward.op, forward.call, forward.backward) == ("MatMul", node.call, False)


def test_layers_within_a_function_within_call_are_tagged() -> None:
    inner = tf.function(lambda self, x: tf.tanh(self.a(x)))
    model = Calls(lambda self, x: self.b(inner(self, x)), a=dense("a"), b=dense("b"))
    graph = step_graph(gradients_of(model), FLOATS, models=[model])
    assert paths(graph, "MatMul") == ["net/a", "net/b"]
    assert paths(graph, "Tanh") == ["net"]
    assert of_type(graph, "PartitionedCall") == []


def test_a_loop_and_a_branch_are_ops_of_the_call_they_are_made_in_forward_and_backward() -> None:
    def call(self: Any, x: tf.Tensor) -> tf.Tensor:
        x = tf.cond(tf.reduce_sum(x) > 0, lambda: tf.tanh(self.a(x)), lambda: x)
        return tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, tf.tanh(h)), [0, self.b(x)])[1]

    model = Calls(call, a=dense("a"), b=dense("b"))
    graph = step_graph(gradients_of(model), FLOATS, models=[model])
    branches = [*of_type(graph, "If"), *of_type(graph, "StatelessIf")]
    loops = [*of_type(graph, "While"), *of_type(graph, "StatelessWhile")]
    assert [(n.backward, graph.calls[n.call].path) for n in branches] == [(False, "net"), (True, "net")]
    assert [(n.backward, graph.calls[n.call].path) for n in loops] == [(False, "net"), (True, "net")]
    assert graph.nodes[branches[1].forward_of or 0] is branches[0]
    assert graph.nodes[loops[1].forward_of or 0] is loops[0]
    # The stacks that the loop fills for its gradient were made while that was taken, but are the loop's own inputs.
    stacks = of_type(graph, "EmptyTensorList")
    assert stacks
    made_late = [*stacks, *(graph.nodes[t.node] for n in stacks for t in n.inputs)]
    assert {(n.backward, n.forward_of, n.call) for n in made_late} >= {(False, None, loops[0].call)}
    assert not any(n.backward or n.forward_of is not None for n in made_late)
    # The branch reads the weights of layer a, in its body.
    assert [graph.variables[v].name.rpartition("/")[2] for v in branches[0].reads] == ["kernel", "bias"]
    assert not set(branches[0].reads) & set(named(graph, "net/b/MatMul/ReadVariableOp").reads)
    assert branches[0].writes == ()


# --- backward ops ---------------------------------------------------------------------------------------------------


def forward_types(graph: OpGraph) -> dict[str, str | None]:
    """For each type of backward op, the type of the op it differentiates."""
    return {
        n.op: None if n.forward_of is None else graph.nodes[n.forward_of].op
        for n in graph.nodes
        if n.backward and n.op != "Const"
    }


def test_backward_ops_name_the_op_they_differentiate_by_structure_not_by_name() -> None:
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            with tf.name_scope("one"):
                y = tf.tanh(x)
            with tf.name_scope("another"):
                z = tf.nn.softplus(tf.nn.elu(tf.sigmoid(y)))
        with tf.name_scope("misleading/one"):
            return z, tape.gradient(z, x)

    assert forward_types(step_graph(step, FLOATS)) == {
        "Sigmoid": "Softplus",  # no type of its own: the product with a sigmoid
        "Mul": "Softplus",
        "EluGrad": "Elu",
        "SigmoidGrad": "Sigmoid",
        "TanhGrad": "Tanh",
    }


def test_where_a_gradient_needs_no_output_the_inputs_tell_the_op() -> None:
    """Two products of the same tensor by different weights: their gradients need inputs only."""
    w, v = tf.Variable(tf.ones([8, 8])), tf.Variable(tf.ones([8, 8]))

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(tf.matmul(x, w, name="first") * tf.matmul(x, v, name="second"))
        return total, tape.gradient(total, [w, v])

    graph = step_graph(step, FLOATS)
    _, of_w, of_v = (graph.nodes[t.node] for t in graph.outputs)
    assert graph.nodes[of_w.forward_of or 0].name == "first"
    assert graph.nodes[of_v.forward_of or 0].name == "second"


def test_where_two_ops_read_the_same_tensors_their_order_tells_the_op() -> None:
    w = tf.Variable(tf.ones([8, 8]))

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            weight = w.read_value()
            # Raw ops open no name scope of their own, which would tell them apart.
            first = tf.raw_ops.MatMul(a=x, b=weight, name="first")
            second = tf.raw_ops.MatMul(a=weight, b=x, name="second")
            total = tf.reduce_sum(first * second)
        return total, tape.gradient(total, w)

    graph = step_graph(step, tf.TensorSpec([8, 8], tf.float32))
    differentiated = [n.forward_of for n in of_type(graph, "MatMul") if n.backward]
    assert {graph.nodes[n].name for n in differentiated if n is not None} == {"first", "second"}


def test_a_gradient_taken_within_a_custom_gradient_belongs_to_the_inner_op() -> None:
    """Both begin with the same op; the inner one is what it was made for."""

    @tf.custom_gradient
    def halved(x: tf.Tensor) -> Any:
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = tf.tanh(x)
        return y, lambda upstream: tf.atan(inner.gradient(y, x, output_gradients=upstream))

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = halved(x)
        return y, tape.gradient(y, x)

    graph = step_graph(step, FLOATS)
    (inner,), (outer,) = of_type(graph, "TanhGrad"), of_type(graph, "Atan")
    assert graph.nodes[inner.forward_of or 0].op == "Tanh"
    assert graph.nodes[outer.forward_of or 0].op == "IdentityN"


def test_custom_gradients_and_recomputation_belong_to_the_call_they_differentiate() -> None:
    @tf.custom_gradient
    def steep(x: tf.Tensor) -> Any:
        return tf.sin(x), lambda upstream: upstream * tf.cosh(x)

    again = tf.recompute_grad(lambda x: tf.atan(tf.tanh(x)))
    model = Calls(lambda self, x: self.c(again(self.b(steep(self.a(x))))), a=dense("a"), b=dense("b"), c=dense("c"))
    graph = step_graph(gradients_of(model), FLOATS, models=[model])
    (cosh,) = of_type(graph, "Cosh")
    assert (cosh.backward, graph.calls[cosh.call].path) == (True, "net")
    assert cosh.forward_of is not None
    # The recomputed ops belong to the model, whose call made the first ones.
    assert [(n.backward, graph.calls[n.call].path) for n in of_type(graph, "Tanh")] == [(False, "net"), (True, "net")]
    assert all(graph.calls[n.call].path == "net" for n in of_type(graph, "TanhGrad"))
    assert paths(graph, "MatMul", backward=True) == ["net/c", "net/c", "net/b", "net/b", "net/a"]


def test_the_backward_call_of_a_fused_layer_belongs_to_its_forward_call() -> None:
    lstm = layers.LSTM(8, name="lstm")
    model = tf_keras.Sequential([lstm, dense("out")], name="net")
    model(tf.zeros([2, 5, 8]))
    graph = step_graph(gradients_of(model), tf.TensorSpec([2, 5, 8], tf.float32), models=[model])
    (forward,) = [n for n in graph.nodes if "Call" in n.op and not n.backward]
    (backward,) = [n for n in graph.nodes if "Call" in n.op and n.backward]
    assert graph.calls[forward.call].path == graph.calls[backward.call].path == "net/lstm"
    assert graph.nodes[backward.forward_of or 0] is forward


def test_zeros_for_what_a_fused_layer_keeps_belong_to_its_call() -> None:
    """They are like variants, which cannot leave the stage of the layer."""
    model = tf_keras.Sequential([layers.LSTM(8, name="lstm"), dense("out")], name="net")
    model(tf.zeros([2, 5, 8]))

    def step(x: tf.Tensor) -> Any:
        loss = tf.reduce_sum(model(x))
        return loss, tf.gradients(loss, x)

    graph = step_graph(step, tf.TensorSpec([2, 5, 8], tf.float32), models=[model])
    (forward,) = [n for n in graph.nodes if "Call" in n.op and not n.backward]
    zeros = of_type(graph, "ZerosLike")
    assert zeros
    for node in zeros:
        assert (node.backward, graph.calls[node.call].path) == (True, "net/lstm")
        assert graph.nodes[node.forward_of or 0] is forward


def test_a_second_gradient_through_the_first_is_backward_too() -> None:
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.sin(x)
            slope = inner.gradient(y, x)
        return y, slope, outer.gradient(slope, x)

    graph = step_graph(step, FLOATS)
    (cos,) = of_type(graph, "Cos")
    first, second = of_type(graph, "Sin")
    assert [n.backward for n in (first, cos, second)] == [False, True, True]
    assert graph.nodes[cos.forward_of or 0] is first


# --- sources and variables ------------------------------------------------------------------------------------------


def test_arguments_captures_and_variables_are_sources() -> None:
    w = tf.Variable(tf.ones([8, 8]), name="w")
    outside = tf.constant([2.0, 3.0])
    result = lowered(lambda a, b: (tf.matmul(b, w) * outside[0], tf.shape(a)), FLOATS, FLOATS)
    graph = result.graph
    sources = {n.op: [(m.source, m.outputs) for m in of_type(graph, n.op)] for n in graph.nodes if n.op in SOURCES}
    floats = TensorType("float32", (4, 8))
    assert sources == {
        ARGUMENT: [(0, (floats,)), (1, (floats,))],
        VARIABLE: [(0, (TensorType("resource", ()),))],
        CAPTURE: [(0, (TensorType("float32", (2,)),))],
    }
    assert [v is w for v in result.variables] == [True]
    assert [t is outside for t in result.captures] == [True]
    assert all(n.definition == b"" and not n.stateful and n.call == 0 for n in graph.nodes if n.op in SOURCES)
    (product,) = of_type(graph, "MatMul")
    assert [graph.nodes[t.node].op for t in product.inputs] == [ARGUMENT, "ReadVariableOp"]
    assert graph.nodes[product.inputs[0].node].source == 1


def test_variables_are_described_with_type_owner_and_whether_the_step_writes_them() -> None:
    model = Calls(lambda self, x: self.a(x), a=dense("a"))
    mine = tf.Variable(tf.zeros([2], tf.int64), trainable=False, name="mine")
    unread = tf.Variable(1.0, name="unread")

    def step(x: tf.Tensor) -> Any:
        mine.assign_add([1, 1])
        return model(x)

    graph = lowered(step, FLOATS, models=[model]).graph
    assert unread.name == "unread:0"
    assert graph.variables == (
        Variable(0, "mine", TensorType("int64", (2,)), False, False, read_only=False),
        Variable(1, "net/a/kernel", TensorType("float32", (8, 8)), True, True, read_only=True),
        Variable(2, "net/a/bias", TensorType("float32", (8,)), True, True, read_only=True),
    )


def test_reads_and_writes_are_said_also_those_of_functions() -> None:
    a, b, c = (tf.Variable(1.0, name=name) for name in "abc")

    def step(x: tf.Tensor) -> Any:
        a.assign(tf.reduce_sum(x))
        return tf.cond(a > 0, lambda: b.assign_add(1.0), lambda: c.read_value())

    graph = lowered(step, FLOATS).graph
    assert [v.name for v in graph.variables] == ["a", "b", "c"]
    touched = [(n.op, n.reads, n.writes, n.stateful) for n in graph.nodes if n.reads or n.writes]
    assert touched == [
        ("AssignVariableOp", (), (0,), True),
        ("ReadVariableOp", (0,), (), False),
        ("If", (2,), (1,), True),
    ]
    assert [v.read_only for v in graph.variables] == [False, False, True]


def test_gathers_from_a_weight_read_it_and_have_no_effect() -> None:
    table = tf.Variable(tf.ones([20, 8]))
    graph = lowered(lambda x: tf.gather(table, tf.cast(x, tf.int32)), FLOATS).graph
    (gather,) = of_type(graph, "ResourceGather")
    assert (gather.reads, gather.writes, gather.stateful) == ((0,), (), False)


# --- effects and order ----------------------------------------------------------------------------------------------


def test_effects_are_kept_and_in_the_order_of_the_program() -> None:
    count = tf.Variable(0.0, name="count")

    def step(x: tf.Tensor) -> Any:
        tf.print("first", x)
        before = count.read_value()
        count.assign_add(1.0)
        after = count.read_value()
        tf.debugging.assert_all_finite(x, "not finite")
        tf.Assert(tf.reduce_all(x > 0), [x])
        tf.print("last")
        return before, after

    graph = step_graph(step, FLOATS)
    effects = [n for n in graph.nodes if n.stateful]
    assert [n.op for n in effects] == ["PrintV2", "AssignAddVariableOp", "CheckNumerics", "If", "PrintV2"]
    first, assign, _, assertion, last = (graph.number_of[n.name] for n in effects)
    reads = [graph.number_of[n.name] for n in of_type(graph, "ReadVariableOp")]
    assert first in graph.ancestors([last])
    assert first in graph.ancestors([assertion])
    assert reads[0] in graph.nodes[assign].control
    assert assign in graph.ancestors([reads[1]])
    assert assign not in graph.ancestors([reads[0]])


def test_the_order_is_topological_and_otherwise_that_of_creation() -> None:
    """Differentiating a loop adds inputs to it that were made after it; what waits for the loop waits for them too."""
    turns = tf.Variable(0.0)

    def turn(i: tf.Tensor, h: tf.Tensor) -> Any:
        turns.assign_add(1.0)
        return i + 1, tf.tanh(h)

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.while_loop(lambda i, _: i < 3, turn, [0, x])[1]
            turns.assign(0.0)
            z = tf.abs(y)
        return tape.gradient(z, x)

    result = traced(step, FLOATS)
    graph = lower(result, lambda v: (v.name, False)).graph
    graph.validate()
    created = {op.name: number for number, op in enumerate(result.graph.get_operations())}
    numbers = [created[n.name] for n in graph.nodes]
    (loop,) = [n for n in graph.nodes if n.op in ("While", "StatelessWhile") and not n.backward]
    (reset,) = of_type(graph, "AssignVariableOp")
    assert graph.number_of[loop.name] in reset.control
    assert numbers != sorted(numbers)
    assert max(created[graph.nodes[t.node].name] for t in loop.inputs) > created[loop.name]
    # Every node stands where the first node was created that needs it.
    first_need = list(numbers)
    for number in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[number]
        before = {t.node for t in node.inputs} | set(node.control)
        before |= set() if node.forward_of is None else {node.forward_of}
        for other in before:
            first_need[other] = min(first_need[other], first_need[number])
    assert first_need == sorted(first_need)


def test_a_cycle_is_refused() -> None:
    nodes = (
        Node("a", "Neg", (Tensor(1, 0),), (), (TensorType("float32", ()),)),
        Node("b", "Neg", (Tensor(0, 0),), (), (TensorType("float32", ()),)),
    )
    with pytest.raises(TraceError, match="cycle through op 'b'"):
        _in_topological_order(OpGraph(nodes, (Call(0, "", "", None),), (), ()))


# --- what comes out -------------------------------------------------------------------------------------------------


def test_results_become_slots_in_the_same_structure() -> None:
    table = tf.Variable(tf.ones([20, 8]))

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(tf.gather(table, tf.cast(x, tf.int32)))
        return {"loss": total, "gradients": [tape.gradient(total, table)], "none": None, "number": 3, "again": total}

    result = lowered(step, FLOATS)
    slots = result.results
    assert (slots["none"], slots["number"]) == (None, 3)
    # In the order of the sorted keys: again, gradients, loss.
    assert slots["again"] == OutputSlot((0,))
    assert slots["gradients"][0].outputs == (1, 2, 3)
    assert isinstance(slots["gradients"][0].spec, tf.IndexedSlicesSpec)
    assert slots["loss"] == OutputSlot((4,))
    graph = result.graph
    assert graph.outputs[0] == graph.outputs[4]
    assert graph.nodes[graph.outputs[0].node].op == "Sum"
    assert graph.gradients == (Gradient(0, graph.outputs[1:4]),)


def test_what_tensorflow_adds_for_returning_is_left_out() -> None:
    graph = lowered(lambda x: (x, tf.abs(x)), FLOATS).graph
    assert [n.op for n in graph.nodes] == [ARGUMENT, "Abs"]
    assert graph.outputs == (Tensor(0, 0), Tensor(1, 0))


def test_a_gradient_of_a_variable_is_known_as_such() -> None:
    model = Calls(lambda self, x: self.a(x), a=dense("a"))
    graph = step_graph(gradients_of(model), FLOATS, models=[model])
    assert [(graph.variables[g.variable].name, g.tensors) for g in graph.gradients] == [
        ("net/a/kernel", (graph.outputs[1],)),
        ("net/a/bias", (graph.outputs[2],)),
    ]


def test_types_and_functions_are_kept() -> None:
    def step(x: tf.Tensor) -> Any:
        return tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, tf.tanh(h)), [0, x])[1]

    graph = step_graph(step, tf.TensorSpec([None, 8], tf.float64))
    (loop,) = [n for n in graph.nodes if "While" in n.op]
    assert TensorType("float64", (None, 8)) in loop.outputs
    library = tf.compat.v1.GraphDef().library
    library.ParseFromString(graph.library)
    names = {f.signature.name for f in library.function}
    definition = tf.compat.v1.NodeDef()
    definition.ParseFromString(loop.definition)
    assert {definition.attr["cond"].func.name, definition.attr["body"].func.name} <= names
    assert "Tanh" in {n.op for f in library.function for n in f.node_def}


def test_the_manual_stage_of_a_layer_is_that_of_its_call() -> None:
    from smp_tf.model import manual_placement

    model = Calls(lambda self, x: self.b(self.a(x)), a=dense("a"), b=dense("b"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(manual_placement.partition(1))
        graph = step_graph(lambda x: model(x), FLOATS, models=[model])
    assert [c.stage for c in graph.calls] == [None, 1, 1, 1]
    assert named(graph, "net/a/MatMul").call == 2


def test_backward_ops_of_a_loop_that_read_nothing_of_it_come_after_it() -> None:
    """The loss's constant gradient and a loop's counter once stood before the loop, which gets inputs late."""
    kernel = tf.Variable(tf.ones([8, 8]))

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            y = tf.while_loop(lambda i, y: i < 5, lambda i, y: (i + 1, tf.tanh(y @ kernel)), (0, x))[1]
            loss = tf.reduce_sum(y)
        return tape.gradient(loss, [kernel]), loss

    graph = lowered(step, FLOATS).graph
    pairs = [(number, node.forward_of) for number, node in enumerate(graph.nodes) if node.forward_of is not None]
    assert {graph.nodes[forward].op for _, forward in pairs} >= {"While", "Sum"}
    assert all(forward < number for number, forward in pairs)
