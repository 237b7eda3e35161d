"""Gradients take what a step has written to a variable of the script, and do not read the variable again."""

from __future__ import annotations

import tensorflow as tf

from smp_tf.partition.graph.op_graph import OpGraph
from smp_tf.partition.rewrite.prune import prune
from smp_tf.partition.rewrite.state_reads import as_values, read_before, state_of_gradients
from tests.partition.op_graph_builder import GraphBuilder


def defined(op: str) -> bytes:
    made = tf.compat.v1.NodeDef(op=op)
    made.attr["dtype"].type = tf.float32.as_datatype_enum
    return bytes(made.SerializeToString())


def step(*writes: str, reads_first: bool = False) -> OpGraph:
    """The gradient of a layer's output times a variable of the script, which is written before it is read, or after."""
    builder = GraphBuilder()
    x, kernel = builder.argument((2, 4)), builder.variable("net/kernel", (4, 3))
    state = builder.variable("count", (), in_model=False, read_only=False)
    call = builder.call("net")
    output = builder.add("MatMul", x, builder.read(kernel, call), call=call, shape=(2, 3))
    first = builder.add("ReadVariableOp", state, shape=(), reads=(1,)) if reads_first else None
    last: tuple[int, ...] = (first.node,) if first is not None else ()
    for op in writes:
        one = builder.add("Const", shape=())
        reads = (1,) if op != "AssignVariableOp" else ()
        given = {"stateful": True, "outputs": (), "writes": (1,), "reads": reads, "definition": defined(op)}
        last = (builder.add(op, state, one, control=last, **given).node,)  # type: ignore[arg-type]
    weight = first or builder.add("ReadVariableOp", state, shape=(), control=last, reads=(1,))
    gradient = builder.add("Mul", output, weight, backward=True, shape=(4, 3))
    builder.gradient(kernel, gradient)
    return builder.graph(gradient)


def text_of(graph: OpGraph) -> list[str]:
    """What the gradient needs, as in a formula."""

    def told(number: int) -> str:
        node = graph.nodes[number]
        return f"{node.op}({', '.join(told(tensor.node) for tensor in node.inputs)})"

    return [told(tensor.node) for tensor in graph.outputs]


LAYER = "MatMul(SmpArgument(), ReadVariableOp(SmpVariable()))"
BEFORE = "ReadVariableOp(SmpVariable())"


def test_what_was_assigned_is_used() -> None:
    assert text_of(as_values(step("AssignVariableOp"))) == [f"Mul({LAYER}, Const())"]


def test_what_was_added_is_added_to_what_was_there() -> None:
    graph = as_values(step("AssignAddVariableOp"))
    assert text_of(graph) == [f"Mul({LAYER}, AddV2({BEFORE}, Const()))"]
    [read] = [number for number, node in enumerate(graph.nodes) if node.name.endswith("/before")]
    [write] = [node for node in graph.nodes if node.writes]
    assert read in write.control


def test_several_writes_follow_each_other() -> None:
    graph = as_values(step("AssignAddVariableOp", "AssignSubVariableOp"))
    assert text_of(graph) == [f"Mul({LAYER}, Sub(AddV2({BEFORE}, Const()), Const()))"]
    graph = as_values(step("AssignAddVariableOp", "AssignVariableOp", "AssignAddVariableOp"))
    assert text_of(graph) == [f"Mul({LAYER}, AddV2(Const(), Const()))"]


def test_of_one_microbatch_gradients_read_what_was_there_before() -> None:
    graph, added = read_before(as_values(step("AssignAddVariableOp")))
    assert added == (1,)
    assert [(v.name, v.read_only) for v in graph.variables[1:]] == [("count", False), ("count before the step", True)]
    assert state_of_gradients(graph) is None
    assert sorted({node.reads for node in prune(graph).nodes if node.reads}) == [(0,), (1,), (2,)]


def test_what_is_read_before_it_is_written_stays_as_it_is() -> None:
    graph = step("AssignAddVariableOp", reads_first=True)
    assert as_values(graph) is graph
    assert state_of_gradients(graph) == "count"
    assert state_of_gradients(read_before(graph)[0]) is None


def test_a_write_of_another_kind_is_no_value() -> None:
    graph = step("ResourceScatterAdd")
    assert as_values(graph) is graph
    assert read_before(graph) == (graph, ())
    assert state_of_gradients(graph) == "count"


def test_a_step_without_such_variables_stays_as_it_is() -> None:
    builder = GraphBuilder()
    x, kernel = builder.argument((2, 4)), builder.variable("net/kernel", (4, 3))
    gradient = builder.add("MatMul", x, builder.read(kernel), backward=True, shape=(4, 3))
    builder.gradient(kernel, gradient)
    graph = builder.graph(gradient)
    assert as_values(graph) is graph
    assert read_before(graph) == (graph, ())
