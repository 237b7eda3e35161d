"""States and results that belong together run together: once per batch, or for every microbatch."""

from __future__ import annotations

from smp_tf.partition.graph.op_graph import OpGraph, Tensor
from smp_tf.partition.rewrite.prune import prune
from smp_tf.partition.samples.once_per_batch import OncePerBatch, find_once_per_batch
from smp_tf.partition.samples.sample_rows import SampleRows
from tests.partition.op_graph_builder import GraphBuilder

WHOLE, PART = 8, 2


def step(n: int, *, is_random: bool = False, also_returned: bool = False) -> tuple[OpGraph, dict[str, Tensor]]:
    """A dense layer, and a metric that is given the mean of its output: total += mean; result = total.

    Args:
        n: samples it is traced for.
        is_random: whether the mean is multiplied by a random number.
        also_returned: whether the step returns a gradient times what the metric holds, too.
    """
    builder = GraphBuilder()
    x, kernel = builder.argument((n, 4)), builder.variable("net/kernel", (4, 3))
    total = builder.variable("total", (), in_model=False, read_only=False)
    call = builder.call("net")
    output = builder.add("MatMul", x, builder.read(kernel, call), call=call, shape=(n, 3))
    mean = builder.add("Mean", output, builder.add("Const", shape=(2,), dtype="int32"), shape=())
    if is_random:
        mean = builder.add("Mul", mean, builder.add("RandomUniform", stateful=True, shape=()), shape=())
    builder.add("AssignAddVariableOp", total, mean, stateful=True, outputs=(), writes=(1,), reads=(1,))
    written = len(builder.nodes) - 1
    result = builder.add("ReadVariableOp", total, shape=(), control=(written,), reads=(1,))
    outputs = {"mean": mean, "result": result}
    if also_returned:
        gradient = builder.add("MatMul", x, output, backward=True, shape=(4, 3))
        builder.gradient(kernel, gradient)
        outputs["scaled"] = builder.add("Mul", gradient, result, shape=(4, 3))
    return builder.graph(*outputs.values()), outputs


def chosen(**kind: bool) -> tuple[OncePerBatch, OpGraph]:
    whole, of_whole = step(WHOLE, **kind)
    part, of_part = step(PART, **kind)
    logs = {name: (of_whole[name], of_part[name]) for name in ("mean", "result")}
    rows = SampleRows(whole, part, WHOLE)
    return find_once_per_batch(rows, whole, part, logs, {0: 0, 1: 1}), part


def test_a_metric_runs_once_per_batch_and_its_update_leaves_the_microbatch() -> None:
    once, part = chosen()
    assert once.logs == {"mean", "result"}
    assert once.states == {1}
    cut = once.tail.cuts[0].part
    without = prune(OpGraph(once.part.nodes, once.part.calls, once.part.variables, (cut,)))
    assert [node.op for node in without.nodes] == ["SmpArgument", "SmpVariable", "ReadVariableOp", "MatMul"]
    assert any(node.writes for node in part.nodes)


def test_what_draws_random_numbers_stays_with_the_state_that_it_is_added_to() -> None:
    once, part = chosen(is_random=True)
    assert (once.logs, once.states) == (frozenset(), frozenset())
    assert once.part is part


def test_a_state_that_microbatches_need_stays_with_what_reads_it() -> None:
    once, _ = chosen(also_returned=True)
    assert (once.logs, once.states) == ({"mean"}, frozenset())
    assert any(node.writes for node in once.part.nodes)
