"""Steps of small Keras models, traced, lowered and cut as a test says, without a planner and without processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from smp_tf.keras import layers
from smp_tf.partition.graph.op_graph import Node, OpGraph
from smp_tf.partition.plan.plan import Plan
from smp_tf.partition.rewrite.prune import prune
from smp_tf.partition.split.split import Split
from smp_tf.partition.trace.lower import Lowered, lower
from smp_tf.partition.trace.trace import Recorder, Trace, trace
from smp_tf.pipeline.planner.cut import cut as cut_by_plan

FLOATS = tf.TensorSpec([4, 8], tf.float32)


def traced(
    function: Callable[..., Any], *specs: tf.TypeSpec, models: Sequence[Any] = (), autograph: bool = False
) -> Trace:
    """A step function, traced; layers announce their calls within the given models."""

    def scopes(recorder: Recorder) -> Any:
        return layers.tag_calls(recorder, lambda layer: any(layer is m for m in models))

    return trace(function, specs, lambda body, tensors: body(*tensors), scopes=scopes, autograph=autograph)


#: What a graph refers to must outlive it: the functions that its nodes call are dropped with their trace.
_KEPT: list[Trace] = []


def lowered(
    function: Callable[..., Any], *specs: tf.TypeSpec, models: Sequence[Any] = (), autograph: bool = False
) -> Lowered:
    """A step function, traced and lowered, with everything in it that the trace holds."""
    result = traced(function, *specs, models=models, autograph=autograph)
    _KEPT.append(result)
    ours = {id(v.handle) for model in models for v in model.variables}
    seen: Counter[str] = Counter()

    def describe(variable: tf.Variable) -> tuple[str, bool]:
        base = variable.name.partition(":")[0]
        seen[base] += 1
        return (base if seen[base] == 1 else f"{base}_{seen[base] - 1}"), id(variable.handle) in ours

    return lower(result, describe)


def step_graph(function: Callable[..., Any], *specs: tf.TypeSpec, models: Sequence[Any] = ()) -> OpGraph:
    """A step function's op graph, with nothing in it that neither an output nor an effect needs."""
    return prune(lowered(function, *specs, models=models).graph)


def cut(
    graph: OpGraph,
    chunk_of_unit: Mapping[str, int],
    owners: Mapping[str, int] | None = None,
    local_outputs: frozenset[int] = frozenset(),
    composites: Sequence[tuple[int, ...]] = (),
    schedule: str = "simple",
    placement: Sequence[int] | None = None,
) -> Split:
    """Cut a graph with its units where the test wants them.

    Args:
        graph: a pruned op graph.
        chunk_of_unit: chunk of every unit, by name; the loss goes with the last one.
        owners: chunks of variables, by name; others are owned by their first user.
        local_outputs, composites: as for `split`.
        schedule: for which it is cut.
        placement: the stage of every chunk; None where each is a stage of its own.
    """
    plan = Plan(
        stages=1 + max(placement or chunk_of_unit.values()),
        microbatches=1,
        schedule=schedule,
        objective="memory",
        fingerprint="",
        placement=tuple(placement or range(1 + max(chunk_of_unit.values()))),
        units=dict(chunk_of_unit),
        owners=dict(owners or {}),
        shared=(),
        forecast=(),
        defaulted=(),
        reasons=(),
    )
    return cut_by_plan(graph, plan, local_outputs, composites)


def transfer_table(split: Split) -> list[str]:
    """A transfer a line: from and to as stage.sweep, what, and its shape.

    A sweep of "-" is the start of the step for a source, and the step's results for a target.
    """
    graph = split.graph
    lines = []
    for t in split.transfers:
        if t.tensor is None:
            assert t.variable is not None
            what, shape = f"value of {graph.variables[t.variable].name}", graph.variables[t.variable].type.shape
        else:
            what, shape = f"{graph.nodes[t.tensor.node].name}:{t.tensor.index}", graph.type_of(t.tensor).shape
        source, target = ("-" if sweep is None else sweep for sweep in (t.src_sweep, t.dst_sweep))
        lines.append(
            f"{t.src_chunk}.{source} -> {t.dst_chunk}.{target} {'sum of ' * t.is_sum}{what} {list(shape or ())}"
        )
    return lines


def named(graph: OpGraph, name: str) -> Node:
    """The node of a name."""
    return graph.nodes[graph.number_of[name]]


def of_type(graph: OpGraph, op: str) -> list[Node]:
    """All nodes of an op type, in order."""
    return [node for node in graph.nodes if node.op == op]
